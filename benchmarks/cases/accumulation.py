"""What it costs to exchange gradients in every micro-batch of an accumulation step instead of in the last: two ranks, DDP and FSDP2."""

import json
import os
import statistics
import time
import warnings

import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin

MICRO_BATCHES, STEPS, ROUNDS, WIDTH = 8, 3, 3, 1024
warnings.simplefilter("ignore")
torch.set_num_threads(1)


def trained(sharded, each):
    """Train a new model, and return the milliseconds of an accumulation step and the MiB of gradients kept before its end."""
    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
    accumulation = GradientAccumulationPlugin(num_steps=MICRO_BATCHES, sync_each_batch=each)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_plugin=accumulation)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    inputs, kept = torch.randn(16, WIDTH), 0
    for number in range(-MICRO_BATCHES, STEPS * MICRO_BATCHES):
        if not number:
            begun = time.perf_counter()
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if number == -2:  # while gradients add up
            kept = accelerator.memory_report().rows[0].gradients
    taken = time.perf_counter() - begun
    accelerator.free_memory()
    return taken / STEPS * 1000, kept / 2**20


def main():
    kinds = {(name, each): [] for name in ("DDP", "FSDP2") for each in (False, True)}
    for number in range(ROUNDS):
        for name, each in list(kinds)[:: 1 if number % 2 else -1]:
            kinds[name, each].append(trained(name == "FSDP2", each))
    figures = {}
    for name in ("DDP", "FSDP2"):
        last, every = (
            [statistics.median(column) for column in zip(*kinds[name, each], strict=True)] for each in (False, True)
        )
        figures[f"{name}, exchanged in the last micro-batch (ms)"] = last[0]
        figures[f"{name}, sync_each_batch (ms)"] = every[0]
        figures[f"{name}, sync_each_batch / in the last"] = every[0] / last[0]
        figures[f"{name}, gradients kept meanwhile (MiB)"] = last[1]
        figures[f"{name}, gradients kept meanwhile, sync_each_batch (MiB)"] = every[1]
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
