"""Bad inputs, one after the other; every rank fails by itself, with a message that helps."""

import sys
import warnings

import torch
from expect import raised
from harness import Stream, fresh_accelerator, rank
from torch.utils.data import DataLoader

from accelerate import Accelerator


def without_process_group():
    accelerator.state.destroy_process_group()
    accelerator.gather(torch.ones(1))


warnings.simplefilter("ignore")
accelerator = fresh_accelerator()
endless = accelerator.prepare(DataLoader(Stream([torch.ones(1)] * 4), batch_size=2))
half = torch.nn.Linear(2, 2).half()
for case, error, *fragments in (
    (lambda: accelerator.prepare(), ValueError, "no objects"),
    (lambda: accelerator.prepare("model"), TypeError, "'model'"),
    (lambda: len(endless), TypeError),
    (lambda: accelerator.backward(1.0), TypeError, "loss.item()"),
    (lambda: Accelerator(cpu=True, mixed_precision="fp17"), ValueError, "fp17", "bf16"),
    (lambda: fresh_accelerator(mixed_precision="fp16").prepare(half), ValueError, "weight", "bf16"),
    (without_process_group, RuntimeError, "process group", "Accelerator()"),
):
    with raised(error, *fragments):
        case()
print(f"rank {rank()}: all cases", flush=True)
sys.exit(3)
