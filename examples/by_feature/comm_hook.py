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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed


class Exchanged(TorchDispatchMode):
    """Counts the bytes of the tensors that all-reduces are called with."""

    total = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if "allreduce_" in str(function):
            self.total += sum(tensor.nbytes for tensor in arguments[0])
        return function(*arguments, **(keywords or {}))


def train(hook: str) -> tuple[list[float], int]:
    """Train an epoch; return the mean loss of each step and the bytes of gradients that a rank exchanges in the last."""
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
        with Exchanged() as exchanged:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(f"comm_hook {hook}: {exchanged.total} bytes of gradients a step, last loss {losses[-1]:.4f}")
    accelerator.free_memory()
    return losses, exchanged.total


def main() -> None:
    plain, plain_bytes = train("no")
    compressed, fewer_bytes = train("fp16")
    close = all(abs(ours - theirs) < 0.02 * theirs for ours, theirs in zip(compressed, plain, strict=True))
    shown = close and compressed != plain and 2 * fewer_bytes == plain_bytes > 0
    accelerator = Accelerator()
    accelerator.print(f"half the bytes a step, losses within 2 % of the float32 exchange and not equal to it: {shown}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
