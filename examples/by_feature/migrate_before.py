"""A training loop in plain PyTorch, on one device: the program that `migrate_after.py` changes.

    python examples/by_feature/migrate_before.py

Prints: 84 steps, the loss fell below 0.5: True
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train() -> list[float]:
    """Train two epochs and return the loss of each step."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    loader = DataLoader(rows, batch_size=42, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader))
    losses = []
    for _ in range(2):
        for images, targets in loader:
            images, targets = images.to(device), targets.to(device)
            loss = nn.functional.cross_entropy(model(images), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    torch.save(model.state_dict(), "before.pt")
    return losses


if __name__ == "__main__":
    curve = train()
    print(f"{len(curve)} steps, the loss fell below 0.5: {sum(curve[-5:]) / 5 < 0.5}")
