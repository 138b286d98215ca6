"""The first program: an ordinary PyTorch loop on two processes, with an exact evaluation.

What to look at: `Accelerator()` finds out how the program was launched, `prepare` gives each rank its part of the data and a replica
of the model, `backward` averages the gradients over the ranks, and `gather_for_metrics` collects predictions without the samples
that fill up the last batch.

    accelerate launch --cpu --num_processes 2 examples/by_feature/first.py

Prints: 2 ranks, accuracy above 0.9 on 360 held-out digits: True
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)  # all ranks build the same model
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, held_out = train_test_split(range(len(labels)), test_size=360, random_state=0)
    training = DataLoader(TensorDataset(pixels[train], labels[train]), batch_size=32, shuffle=True)  # 32 on each rank
    evaluation = DataLoader(TensorDataset(pixels[held_out], labels[held_out]), batch_size=64)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, training, evaluation = accelerator.prepare(model, optimizer, training, evaluation)

    for epoch in range(5):
        model.train()
        for images, targets in training:
            loss = nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}  loss of the last batch on rank 0: {loss.item():.3f}")

    model.eval()
    right = seen = 0
    for images, targets in evaluation:
        with torch.no_grad():
            guesses = model(images).argmax(dim=1)
        guesses, targets = accelerator.gather_for_metrics((guesses, targets))
        right, seen = right + (guesses == targets).sum().item(), seen + len(targets)
    ranks = accelerator.num_processes
    accelerator.print(f"{ranks} ranks, accuracy above 0.9 on {seen} held-out digits: {right / seen > 0.9}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
