"""How fast the run is, where the time goes, and which rank the others wait for.

`throughput(samples=...)` ends a step; `throughput_report()` gives each rank's rates and shares of its time, and names a rank whose own work
takes longer than chance explains. In data parallelism the others wait for it in the exchange of gradients. Here rank 1 computes much more
than the others; in life it is a hot GPU, a slow disk or a busy machine.

    accelerate launch --cpu --num_processes 2 examples/by_feature/slow_rank.py

Prints: the report names rank 1: True
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


class Extra(nn.Module):
    """Hands its input on, after some work that changes nothing."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(self.rounds):
                torch.mm(torch.ones(256, 256), torch.ones(256, 256))
        return states


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    slow = accelerator.process_index == 1
    model = nn.Sequential(nn.Linear(64, 64), Extra(20 if slow else 0), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=32, shuffle=True))

    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.throughput(samples=len(images))  # last in the loop
    report = accelerator.throughput_report()  # all ranks; `report.values()` is for a tracker
    accelerator.print(report)
    accelerator.print(f"the report names rank 1: {report.slowest == 1}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
