"""Tensor parallelism: two ranks share each layer and work on the same batch.

The plan says how each layer is cut: "colwise" gives a rank some of the output features, "rowwise" the matching input features of the
next layer, so that a pair of matrices costs one all-reduce. Models of transformers bring their plan. All ranks of the group read the same
batches, which `prepare` sees to. The losses equal those of one process with the same batch size.

    accelerate launch --cpu --num_processes 2 examples/by_feature/tp.py

Prints: each rank holds half of the sharded layers, same curve as one process: True
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import TorchTensorParallelConfig, set_seed


class Block(nn.Module):
    """A wide layer and its way back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + self.down(torch.relu(self.up(states)))


def train(model: nn.Module, loader: DataLoader, accelerator: Accelerator | None = None) -> torch.Tensor:
    """Train a pass over the loader, and return the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def main() -> None:
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    mesh = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
    accelerator = Accelerator(parallelism_config=mesh)
    set_seed(0)
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32)[:512] / 16, torch.tensor(digits.target)[:512])
    model = nn.Sequential(Block(64), Block(64), nn.Linear(64, 10))
    expected = train(copy.deepcopy(model), DataLoader(rows, batch_size=64))
    found = train(model, DataLoader(rows, batch_size=64), accelerator)
    weight = model[0].up.weight
    accelerator.print(f"up.weight: {tuple(weight.shape)} in all, {tuple(weight.to_local().shape)} on rank 0")
    half = 2 * weight.to_local().numel() == weight.numel()
    same = torch.allclose(found, expected, atol=1e-4)
    accelerator.print(f"each rank holds half of the sharded layers, same curve as one process: {half and same}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
