"""What looking on costs: a step of two ranks that is measured by `throughput`, or whose replicas are compared, beside a step alone."""

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

STEPS, REPEATS = 50, 8
warnings.simplefilter("ignore")
torch.set_num_threads(1)


def training(every=0, measured=False):
    """Return a function that trains for some steps and returns the milliseconds of one."""
    os.environ["ACCELERATE_CHECK_EVERY"] = str(every)
    accelerator = Accelerator(cpu=True)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = nn.Sequential(*layers)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    inputs = torch.randn(256, 512)

    def run():
        begun = time.perf_counter()
        for _ in range(STEPS):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if measured:
                accelerator.throughput(samples=256, flops=1.0)
        return (time.perf_counter() - begun) / STEPS * 1000

    run()
    return run


def main():
    """Train in turns, and compare neighbours."""
    alone = training()
    others = {"throughput": training(measured=True), "CHECK_EVERY=10": training(10), "CHECK_EVERY=1": training(1)}
    steps, ratios = [], {name: [] for name in others}
    begun, before = time.perf_counter(), psutil.Process().threads()
    for _ in range(REPEATS):
        for name, run in others.items():
            steps.append(alone())
            ratios[name].append(run() / steps[-1])
    used = {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}
    watcher = next(thread.native_id for thread in threading.enumerate() if "hang" in thread.name)
    spent = used[watcher] - next(each.user_time + each.system_time for each in before if each.id == watcher)
    figures = {"step (ms)": statistics.median(steps)}
    figures |= {f"step with {name} / alone": statistics.median(values) for name, values in ratios.items()}
    figures["watcher of hangs, CPU (ms per s)"] = 1000 * spent / (time.perf_counter() - begun)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
