"""What a device reaches at most: matrix products of bfloat16, copies within its memory, and from the host."""

import json
import statistics
import time
from functools import partial

import torch
from device import CPU, DEVICE, finish

SIDE, MEGABYTES, REPEATS = (512, 16, 3) if CPU else (8192, 4096, 10)


def seconds(task):
    """Return the median time of a task, after it ran twice."""
    times = []
    for _ in range(REPEATS + 2):
        finish()
        start = time.perf_counter()
        task()
        finish()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def main():
    figures = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        one, other = (torch.randn(SIDE, SIDE, device=DEVICE).to(dtype) for _ in range(2))
        figures[f"matrix products in {name} (TFLOP/s)"] = (
            2 * SIDE**3 / seconds(partial(torch.matmul, one, other)) / 1e12
        )
    source = torch.ones(MEGABYTES * 2**18, device=DEVICE)
    target = torch.empty_like(source)
    figures["memory, read and written (GB/s)"] = 2 * source.nbytes / seconds(lambda: target.copy_(source)) / 1e9
    if not CPU:
        host = torch.ones(MEGABYTES * 2**16, pin_memory=True)
        figures["from pinned host memory (GB/s)"] = host.nbytes / seconds(lambda: host.to(DEVICE)) / 1e9
        figures["memory in all (GiB)"] = torch.cuda.get_device_properties(DEVICE).total_memory / 2**30
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
