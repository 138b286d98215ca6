"""The loop of `migrate_before.py` on any number of processes; the lines that changed are marked with `<-`.

`batch_size=42` stays the batch of all ranks together here (`split_batches=True`), so the learning rate and the number of steps stay
right. Without it each rank reads 42 samples a step, and the global batch grows with the number of ranks.

    accelerate launch --cpu --num_processes 2 examples/by_feature/migrate_after.py

Prints: 2 ranks, 84 steps, the loss fell below 0.5: True
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration  # <-
from accelerate.utils import set_seed  # <-


def train(accelerator: Accelerator) -> list[float]:
    """Train two epochs and return the loss of each step, the mean over the ranks."""
    set_seed(0)  # <- also seeds Python and NumPy
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    loader = DataLoader(rows, batch_size=42, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # <- no .to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)  # <-
    losses = []
    for _ in range(2):
        for images, targets in loader:  # <- batches are on the device
            loss = nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)  # <-
            accelerator.clip_grad_norm_(model.parameters(), 1.0)  # <-
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())  # <- of all ranks
    accelerator.save_model(model, "after")  # <- full weights as safetensors, under every strategy
    return losses


if __name__ == "__main__":
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))  # <-
    curve = train(accelerator)
    below = sum(curve[-5:]) / 5 < 0.5
    accelerator.print(f"{accelerator.num_processes} ranks, {len(curve)} steps, the loss fell below 0.5: {below}")
    accelerator.end_training()
