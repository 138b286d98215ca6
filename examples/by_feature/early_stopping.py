"""Leave the loop on all ranks in the same step, whichever rank decides it.

A rank that leaves a loop alone makes the others wait for ever in their next collective. `set_trigger` raises a flag on one rank;
`check_trigger`, called by all ranks at the same place, says on all of them whether any flag is up. Here only rank 0 evaluates and
decides: the validation loss has not improved for three epochs.

    accelerate launch --cpu --num_processes 2 examples/by_feature/early_stopping.py

Prints: rank 0 decided, 2 ranks stopped in the same epoch, before the last: True
"""

import torch
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

EPOCHS, PATIENCE = 60, 3


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    wine = load_wine()
    features = torch.tensor(wine.data, dtype=torch.float32)
    features, classes = (features - features.mean(dim=0)) / features.std(dim=0), torch.tensor(wine.target)
    train, held_out = train_test_split(range(len(classes)), test_size=0.5, random_state=0)
    loader = DataLoader(TensorDataset(features[train], classes[train]), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    best, waited = float("inf"), 0
    for epoch in range(EPOCHS):
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:  # one rank knows; the module inside needs no collective
            with torch.no_grad():
                scores = accelerator.unwrap_model(model)(features[held_out].to(accelerator.device))
            validation = nn.functional.cross_entropy(scores.cpu(), classes[held_out]).item()
            best, waited = (validation, 0) if validation < best else (best, waited + 1)
            if waited == PATIENCE:
                accelerator.set_trigger()
        accelerator.print(f"epoch {epoch}  loss of the last batch on rank 0: {loss.item():.4f}")
        if accelerator.check_trigger():  # all ranks
            break

    epochs = accelerator.gather(torch.tensor([epoch], device=accelerator.device)).tolist()
    accelerator.print(f"last epoch of each rank: {epochs}")
    shown = len(set(epochs)) == 1 and epoch < EPOCHS - 1
    accelerator.print(
        f"rank 0 decided, {accelerator.num_processes} ranks stopped in the same epoch, before the last: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
