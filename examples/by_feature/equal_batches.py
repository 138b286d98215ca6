"""Why the loss curve depends on the global batch and not on the number of ranks.

Global batch = batch of a rank x accumulation steps x ranks. The program holds the global batch at 48 samples, whatever number of
processes it is launched with, and compares its losses with those of a plain loop over batches of 48. Change one factor without
another and the curve, the number of steps and the right learning rate change as well.

    accelerate launch --cpu --num_processes 3 examples/by_feature/equal_batches.py

Prints: 3 ranks, same curve as one process with batches of 48: True
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

GLOBAL_BATCH, EPOCHS = 48, 2


def plain_curve(model: nn.Module, rows: TensorDataset) -> torch.Tensor:
    """Train without Accelerate, on whole batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for _ in range(EPOCHS):
        for images, targets in DataLoader(rows, batch_size=GLOBAL_BATCH):
            loss = nn.functional.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return torch.tensor(losses)


def curve(accelerator: Accelerator, model: nn.Module, rows: TensorDataset) -> torch.Tensor:
    """Train the same model on parts of the same batches, and return the losses averaged over the ranks."""
    loader = DataLoader(rows, batch_size=GLOBAL_BATCH // accelerator.num_processes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(EPOCHS):
        for images, targets in loader:
            loss = nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return torch.tensor(losses)


def main() -> None:
    accelerator = Accelerator()
    if GLOBAL_BATCH % accelerator.num_processes:
        raise SystemExit(f"{GLOBAL_BATCH} samples do not divide by {accelerator.num_processes} ranks")
    set_seed(0)
    digits = load_digits()
    kept = len(digits.target) // GLOBAL_BATCH * GLOBAL_BATCH  # whole batches alone: a mean of parts is the mean of all
    pixels, labels = torch.tensor(digits.data[:kept], dtype=torch.float32) / 16, torch.tensor(digits.target[:kept])
    rows = TensorDataset(pixels, labels)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    expected = plain_curve(copy.deepcopy(model), rows)
    found = curve(accelerator, model, rows)
    accelerator.print(f"first and last loss: {found[0]:.4f} and {found[-1]:.4f}, in one process {expected[-1]:.4f}")
    same = torch.allclose(found, expected, atol=1e-4)
    ranks = accelerator.num_processes
    accelerator.print(f"{ranks} ranks, same curve as one process with batches of {GLOBAL_BATCH}: {same}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
