"""DeepSpeed's ZeRO stages 2 and 3, with an unchanged loop.

Stage 2 divides optimizer state and gradients, stage 3 weights as well. The engine takes the step inside `backward`; `optimizer.step()`
and `zero_grad()` do nothing. Both curves equal that of one process with the global batch. It needs
`pip install "accelerate[deepspeed] @ git+https://github.com/OWNER/accelerate-fork.git"`; `make test-deepspeed` runs it.

    accelerate launch --cpu --num_processes 2 examples/by_feature/deepspeed_zero.py

Prints: ZeRO 2 and 3 on 2 ranks, same curves as one process: True
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

BATCH, STEPS = 64, 8


def train(model: nn.Module, loader: DataLoader, accelerator: Accelerator | None = None) -> torch.Tensor:
    """Train, on one process or with an Accelerator, and return the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if accelerator is not None:
        # Model and optimizer in one call: they become one engine.
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach() if accelerator is None else accelerator.reduce(loss.detach(), "mean"))
    return torch.stack(losses).cpu()


def main() -> None:
    set_seed(0)
    digits, kept = load_digits(), BATCH * STEPS
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    rows = TensorDataset(pixels[:kept], labels[:kept])
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    expected = train(copy.deepcopy(network), DataLoader(rows, batch_size=BATCH))
    same = []
    for stage in (2, 3):
        AcceleratorState._reset_state(reset_partial_state=False)
        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=0.0)
        accelerator = Accelerator(cpu=not torch.cuda.is_available(), deepspeed_plugin=plugin)
        batches = DataLoader(rows, batch_size=BATCH // accelerator.num_processes)
        found = train(copy.deepcopy(network), batches, accelerator)
        accelerator.print(f"ZeRO {stage}: last loss {found[-1]:.4f}, in one process {expected[-1]:.4f}")
        same.append(torch.allclose(found, expected, atol=1e-3))
        accelerator.free_memory()
    accelerator.print(f"ZeRO 2 and 3 on {accelerator.num_processes} ranks, same curves as one process: {all(same)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
