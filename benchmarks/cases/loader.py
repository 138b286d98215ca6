"""Iterating a prepared loader, per batch: tensors, a dict of tensors, dispatched batches, and a long skip."""

import json
import statistics
import time
import warnings

import torch
from device import CPU, finish

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches

BATCHES, REPEATS = 3000, 5
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


def per_batch(loader):
    start = time.perf_counter()
    count = 0
    for _ in loader:
        count += 1
    finish()
    return (time.perf_counter() - start) / count * 1e6


def compare(accelerator, make):
    plain, prepared = make(), accelerator.prepare(make())
    rounds = [(per_batch(plain), per_batch(prepared)) for _ in range(REPEATS)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def main():
    accelerator = Accelerator(cpu=CPU)
    tensors = torch.randn(4 * BATCHES, 8)
    plain, prepared = compare(accelerator, lambda: torch.utils.data.DataLoader(tensors, batch_size=4))
    figures = {"plain loader, tensors (us)": plain, "prepared, tensors (us)": prepared}
    plain, prepared = compare(accelerator, lambda: torch.utils.data.DataLoader(Rows(4 * BATCHES), batch_size=4))
    figures.update({"plain loader, dict of 4 (us)": plain, "prepared, dict of 4 (us)": prepared})

    long = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(1_000_001), batch_size=1))
    start = time.perf_counter()
    next(iter(skip_first_batches(long, 1_000_000)))
    figures["skip 1,000,000 batches (ms)"] = (time.perf_counter() - start) * 1e3

    accelerator.free_memory()
    dispatching = Accelerator(cpu=CPU, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = dispatching.prepare(torch.utils.data.DataLoader(tensors, batch_size=4))
    figures["dispatched, one process (us)"] = statistics.median(per_batch(loader) for _ in range(REPEATS))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
