"""Distillation: a frozen teacher next to the model that is trained.

`prepare_model(teacher, evaluation_mode=True)` places the teacher and gives it the same autocast, and no DDP wrapper: there is nothing to
exchange for a model that is not trained. Its parameters are not handed to the optimizer, and it is omitted of `accumulate`.

    accelerate launch --cpu --num_processes 2 examples/by_feature/distil.py

Prints: the student learned from the teacher alone, accuracy above 0.9 without labels: True
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def accuracy(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Return the share of digits that are recognised. Collective: call on every rank."""
    hits = []
    with torch.no_grad():
        for images, targets in loader:
            hits.append(accelerator.gather_for_metrics(model(images).argmax(dim=1) == targets))
    return torch.cat(hits).float().mean().item()


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    loader = accelerator.prepare(DataLoader(rows, batch_size=32, shuffle=True))

    teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=3e-3)
    teacher, optimizer = accelerator.prepare(teacher, optimizer)
    for _ in range(4):
        for images, targets in loader:
            accelerator.backward(nn.functional.cross_entropy(teacher(images), targets))
            optimizer.step()
            optimizer.zero_grad()

    frozen = accelerator.unwrap_model(teacher).requires_grad_(False).eval()
    accelerator.free_memory()  # the teacher's optimizer and wrapper are no part of the next training
    student = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    frozen = accelerator.prepare_model(frozen, evaluation_mode=True)
    student, optimizer, loader = accelerator.prepare(student, optimizer, DataLoader(rows, batch_size=32, shuffle=True))
    for _ in range(4):
        for images, _ in loader:  # no labels
            with torch.no_grad():
                wanted = frozen(images).softmax(dim=1)
            loss = nn.functional.cross_entropy(student(images), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    scores = accuracy(accelerator, frozen, loader), accuracy(accelerator, student, loader)
    accelerator.print(f"accuracy: teacher {scores[0]:.3f}, student {scores[1]:.3f}")
    wrapped = isinstance(frozen, nn.parallel.DistributedDataParallel)
    shown = scores[1] > 0.9 and not wrapped
    accelerator.print(f"the student learned from the teacher alone, accuracy above 0.9 without labels: {shown}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
