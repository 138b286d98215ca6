"""What preparing twice costs in checkpoints: time, bytes and `state_dict` calls, on two processes. Runs under torchrun."""

import argparse
import json
import os
import shutil
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from device import CPU
from torch import nn

from accelerate import Accelerator

warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Blocks(nn.Module):
    """A stack of square layers of about so many bytes in float32, which counts its `state_dict` calls."""

    def __init__(self, megabytes, count=10):
        super().__init__()
        width = int((megabytes * 2**20 / 4 / count) ** 0.5)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
        self.calls = 0

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def state_dict(self, *args, **kwargs):
        self.calls += 1
        return super().state_dict(*args, **kwargs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--twice", action="store_true")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=CPU)
    model = Blocks(arguments.megabytes)
    prepared = accelerator.prepare(model)
    if arguments.twice:
        prepared = accelerator.prepare(prepared)
        prepared = accelerator.prepare(model)
        prepared = accelerator.prepare(accelerator.unwrap_model(prepared))
    folder = Path(arguments.folder)
    model.calls = 0
    dist.barrier()
    start = time.perf_counter()
    accelerator.save_state(str(folder))
    dist.barrier()
    saved, save_calls = time.perf_counter() - start, model.calls
    start = time.perf_counter()
    for path in [*folder.rglob("*"), folder] if accelerator.is_main_process else ():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    durable = saved + time.perf_counter() - start
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    model.calls = 0
    dist.barrier()
    start = time.perf_counter()
    accelerator.load_state(str(folder))
    dist.barrier()
    loaded, load_calls = time.perf_counter() - start, model.calls
    if accelerator.is_main_process:
        print(
            json.dumps(
                {
                    "save (s)": saved,
                    "on the disk (s)": durable,
                    "load (s)": loaded,
                    "written (MB)": size / 2**20,
                    "state_dict calls, save": save_calls,
                    "state_dict calls, load": load_calls,
                    "models registered": len(accelerator._models),
                }
            ),
            flush=True,
        )
        shutil.rmtree(folder, ignore_errors=True)
    accelerator.end_training()
    os._exit(0)  # nested wrappers may hang in their destructors; the figures are out


if __name__ == "__main__":
    main()
