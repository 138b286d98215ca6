"""An optimizer without a learning-rate schedule, and its modes for training and evaluation.

Schedule-free optimizers evaluate and save another point than the one they train at: the average of the steps. So `train()` stands before
training, and `eval()` before evaluation and before weights are saved. A prepared optimizer passes both on, and nothing is given to
`prepare` as a scheduler. It needs `pip install schedulefree`. Paper: https://arxiv.org/abs/2405.15682

    accelerate launch --cpu --num_processes 2 examples/by_feature/schedule_free.py

Prints: no schedule, above 93 % of the held-out digits, evaluated at the average of the steps: True
"""

import torch
from schedulefree import SGDScheduleFree
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def accuracy(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Return the share of samples that are recognised. Collective: call on every rank."""
    model.eval()
    right = torch.zeros(2, device=accelerator.device)
    with torch.no_grad():
        for images, targets in loader:
            predicted, expected = accelerator.gather_for_metrics((model(images).argmax(1), targets))
            right += torch.tensor([(predicted == expected).sum(), len(expected)], device=right.device)
    return (right[0] / right[1]).item()


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    rows = TensorDataset(images, torch.tensor(digits.target))
    training, held_out = torch.utils.data.random_split(rows, [1437, 360])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = SGDScheduleFree(model.parameters(), lr=1.0, warmup_steps=20)
    model, optimizer, loader, evaluation = accelerator.prepare(
        model, optimizer, DataLoader(training, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=60)
    )

    for epoch in range(6):
        model.train()
        optimizer.train()
        for images, targets in loader:
            loss = nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        trained_at = next(model.parameters()).detach().clone()
        optimizer.eval()  # the weights are the average now
        moved = (next(model.parameters()) - trained_at).abs().max().item()
        share = accuracy(accelerator, model, evaluation)
        accelerator.print(f"epoch {epoch}: {share:.1%}, weights moved by at most {moved:.4f}")
    shown = share > 0.93 and moved > 0
    accelerator.print(
        f"no schedule, above 93 % of the held-out digits, evaluated at the average of the steps: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
