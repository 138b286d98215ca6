"""Where cases run: on the CPU, or on a GPU for each process where `BENCHMARK_DEVICE=cuda` says so."""

import os

import torch

CPU = os.environ.get("BENCHMARK_DEVICE", "cpu") == "cpu"
DEVICE = torch.device("cpu") if CPU else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def finish():
    """Wait until the device has done what it was given."""
    if not CPU:
        torch.cuda.synchronize()
