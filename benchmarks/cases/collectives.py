"""Collectives between two processes, per call, next to the raw ones they are made of. Runs under torchrun."""

import json
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from device import CPU, DEVICE, finish

from accelerate import Accelerator, DataLoaderConfiguration

CALLS, REPEATS = 300, 5
warnings.simplefilter("ignore")
torch.set_num_threads(1)


def timed(call):
    dist.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    finish()
    return (time.perf_counter() - start) / CALLS * 1e6


def main():
    accelerator = Accelerator(cpu=CPU, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    pair = {"a": torch.ones(16, 8, device=DEVICE), "b": torch.ones(16, device=DEVICE)}
    outputs = {key: value.new_empty((32, *value.shape[1:])) for key, value in pair.items()}
    number = torch.ones(16, 8, device=DEVICE)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.randn(8 * CALLS, 8), batch_size=4))

    def raw_gather():
        for key, value in pair.items():
            dist.all_gather_into_tensor(outputs[key], value)

    def raw_objects():
        dist.all_gather_object([None, None], ["one", "two"])

    calls = {
        "raw gather of two tensors (us)": raw_gather,
        "gather of a dict of two (us)": lambda: accelerator.gather(pair),
        "raw all_reduce (us)": lambda: dist.all_reduce(number.clone()),
        "reduce (us)": lambda: accelerator.reduce(number),
        "raw gather of objects (us)": raw_objects,
        "gather_for_metrics of objects (us)": lambda: accelerator.gather_for_metrics(["one", "two"]),
        "raw barrier (us)": dist.barrier,
        "wait_for_everyone (us)": accelerator.wait_for_everyone,
    }
    for call in calls.values():
        call()
    figures = {name: statistics.median(timed(call) for _ in range(REPEATS)) for name, call in calls.items()}
    times = []
    for _ in range(3):
        start = time.perf_counter()
        count = sum(1 for _ in loader)
        times.append((time.perf_counter() - start) / count * 1e6)
    figures["dispatched, two processes (us)"] = statistics.median(times)
    if accelerator.is_main_process:
        print(json.dumps(figures))
    accelerator.end_training()


if __name__ == "__main__":
    main()
