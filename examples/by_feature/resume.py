"""Stop in the middle of an epoch and continue as if nothing had happened, bit for bit.

`save_state` holds models, optimizers, schedulers, generators, the position in each prepared loader, and what was registered with
`register_for_checkpointing`. `load_state(latest=True)` takes the newest complete checkpoint. The loop needs no arithmetic of batches
to skip: the loader knows its epoch (`loader.iteration`) and continues with the batch that was next.

    accelerate launch --cpu --num_processes 2 examples/by_feature/resume.py

Prints: stopped after 17 of 58 steps, resumed, all later losses equal bit for bit: True
"""

import shutil

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

EPOCHS = 2


class Losses:
    """The losses so far, averaged over the ranks: a registered object is saved once, and all ranks load the same state."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict:
        return {"values": self.values}

    def load_state_dict(self, state: dict) -> None:
        self.values = list(state["values"])


def train(
    accelerator: Accelerator, losses: Losses, stop_after: int | None = None, resume: bool = False
) -> list[float]:
    """Train, from the start or from the newest checkpoint, to the end or until a checkpoint is saved."""
    losses.values = []
    set_seed(0, device_specific=True)  # dropout differs between ranks; `prepare` makes the weights equal
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    loader = DataLoader(rows, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume:
        accelerator.load_state(latest=True)
    for _ in range(loader.iteration, EPOCHS):
        for images, targets in loader:
            loss = nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.values.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(losses.values) == stop_after:
                accelerator.save_state()
                return losses.values
    return losses.values


def main() -> None:
    project = ProjectConfiguration("out/resume", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    if accelerator.is_main_process:
        shutil.rmtree("out/resume", ignore_errors=True)
    accelerator.wait_for_everyone()
    losses = Losses()
    accelerator.register_for_checkpointing(losses)
    whole = train(accelerator, losses)
    accelerator.free_memory()
    stopped = train(accelerator, losses, stop_after=17)
    accelerator.free_memory()  # here a program would end, and another one begin
    resumed = train(accelerator, losses, resume=True)
    same = accelerator.reduce(torch.tensor(float(resumed == whole)), "sum").item() == accelerator.num_processes
    accelerator.print(
        f"stopped after {len(stopped)} of {len(whole)} steps, resumed, all later losses equal bit for bit: {same}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
