"""Dispatched batches between two processes, per step: a small tensor, a dict of four, and a batch of a megabyte."""

import json
import os
import statistics
import time
import warnings

import torch
from device import CPU, finish

from accelerate import Accelerator, DataLoaderConfiguration

STEPS, REPEATS = 400, 3
warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Rows(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"a": ROW, "b": ROW, "c": ROW, "d": ROW}


ROW = torch.ones(8)


def per_step(loader):
    start = time.perf_counter()
    count = sum(1 for _ in loader)
    finish()
    return (time.perf_counter() - start) / count * 1e6


def main():
    accelerator = Accelerator(cpu=CPU, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    kinds = {
        "small tensor (us)": (torch.randn(8 * STEPS, 8), STEPS),
        "dict of 4 (us)": (Rows(8 * STEPS), STEPS),
        "1 MB a process (us)": (torch.randn(8 * 50, 65536), 50),
    }
    figures = {}
    for name, (data, steps) in kinds.items():
        loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4))
        assert len(loader) == steps
        per_step(loader)  # the first epoch learns what a batch looks like
        figures[f"dispatched, {name}"] = statistics.median(per_step(loader) for _ in range(REPEATS))
    if accelerator.is_main_process:
        print(json.dumps(figures), flush=True)
    accelerator.wait_for_everyone()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort an interpreter that ends in the usual way


if __name__ == "__main__":
    main()
