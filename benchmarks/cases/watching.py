"""What looking on costs: a step of two ranks that is measured by `throughput`, or whose replicas are compared, next to a step alone."""

import json
import os
import statistics
import threading
import time
import warnings

import psutil
import torch
from torch import nn

from accelerate import Accelerator

STEPS, ROUNDS = 40, 16
warnings.simplefilter("ignore")
torch.set_num_threads(1)


def milliseconds(every=0, measured=False):
    """Train a new model for some steps, and return the time of one."""
    os.environ["ACCELERATE_CHECK_EVERY"] = str(every)
    accelerator = Accelerator(cpu=True)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = nn.Sequential(*layers)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    inputs = torch.randn(256, 512)
    for step in range(-10, STEPS):
        if not step:
            begun = time.perf_counter()
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if measured:
            accelerator.throughput(samples=256, flops=1.0)
    taken = time.perf_counter() - begun
    accelerator.free_memory()
    return taken / STEPS * 1000


def main():
    """Train new models in turns: where memory comes to lie differs from model to model, so a ratio of medians is of many."""
    kinds = {
        "alone": {},
        "throughput": {"measured": True},
        "CHECK_EVERY=10": {"every": 10},
        "CHECK_EVERY=1": {"every": 1},
    }
    times = {name: [] for name in kinds}
    begun, before = time.perf_counter(), psutil.Process().threads()
    for number in range(ROUNDS):
        for name in list(kinds)[:: 1 if number % 2 else -1]:
            times[name].append(milliseconds(**kinds[name]))
    used = {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}
    watcher = next(thread.native_id for thread in threading.enumerate() if "hang" in thread.name)
    spent = used[watcher] - sum(each.user_time + each.system_time for each in before if each.id == watcher)
    medians = {name: statistics.median(values) for name, values in times.items()}
    figures = {"step (ms)": medians["alone"]}
    figures |= {f"step with {name} / alone": medians[name] / medians["alone"] for name in list(kinds)[1:]}
    figures["watcher of hangs, CPU (ms per s)"] = 1000 * spent / (time.perf_counter() - begun)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
