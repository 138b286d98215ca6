"""A moving average of the weights: evaluated, sharded, saved and resumed.

A high learning rate moves the weights around a minimum; their average lies nearer to it. `accelerator.ema` updates it after each
optimizer step, and `with ema.applied():` the model has it for its weights. It works as it is under DDP, FSDP2 and tensor parallelism: add
`--use_fsdp --fsdp_version 2`.

    accelerate launch --cpu --num_processes 2 examples/by_feature/average.py

Prints: the average recognises more held-out digits than the weights, and comes back from a checkpoint: True
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed


def accuracy(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Return the share of samples that are recognised. Collective: call on every rank."""
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
    model, optimizer, loader, evaluation = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        DataLoader(training, batch_size=8, shuffle=True),
        DataLoader(held_out, batch_size=60),
    )
    ema = accelerator.ema(model, decay=0.98)

    for epoch in range(4):
        for images, targets in loader:
            loss = nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        plain = accuracy(accelerator, model, evaluation)
        with ema.applied():
            averaged = accuracy(accelerator, model, evaluation)
        accelerator.print(f"epoch {epoch}: weights {plain:.1%}, their average {averaged:.1%}")

    folder = broadcast_object_list([tempfile.mkdtemp()])[0]
    accelerator.save_state(folder)
    for images, targets in loader:  # continues, and is taken back
        accelerator.backward(nn.functional.cross_entropy(model(images), targets))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.load_state(folder)
    with ema.applied():
        again = accuracy(accelerator, model, evaluation)
    shown = averaged > max(plain, 0.95) and again == averaged
    accelerator.print(
        f"the average recognises more held-out digits than the weights, and comes back from a checkpoint: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
