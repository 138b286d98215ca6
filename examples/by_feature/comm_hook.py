"""Exchange gradients in float16: half the bytes of the all-reduce of DDP.

`DistributedDataParallelKwargs(comm_hook="fp16")` casts each bucket of gradients before the exchange and back after it; weights and
optimizer stay float32. "bf16" does the same on GPUs with NCCL, and
PowerSGD (`comm_state_option`) sends less still. It pays where the network is slow; the rounding is the
price, so compare the losses on your task. DDP alone has such hooks: FSDP has `reduce_dtype` of its mixed precision policy.

    accelerate launch --cpu --num_processes 2 examples/by_feature/comm_hook.py

Prints: half the bytes a step, losses within 2 % of the float32 exchange and not equal to it: True
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed


def train(hook: str) -> tuple[list[float], int]:
    """Train an epoch; return the mean loss of each step and the bytes of gradients that a rank exchanges in one."""
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)])
    set_seed(0)
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=32))
    losses = []
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    dtype = torch.float16 if hook == "fp16" else torch.float32
    exchanged = sum(parameter.numel() * dtype.itemsize for parameter in model.parameters() if parameter.requires_grad)
    accelerator.print(f"comm_hook {hook}: {exchanged} bytes of gradients a step, last loss {losses[-1]:.4f}")
    accelerator.free_memory()
    return losses, exchanged


def main() -> None:
    plain, plain_bytes = train("no")
    compressed, fewer_bytes = train("fp16")
    close = all(abs(ours - theirs) < 0.02 * theirs for ours, theirs in zip(compressed, plain, strict=True))
    shown = close and compressed != plain and 2 * fewer_bytes == plain_bytes
    accelerator = Accelerator()
    accelerator.print(f"half the bytes a step, losses within 2 % of the float32 exchange and not equal to it: {shown}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
