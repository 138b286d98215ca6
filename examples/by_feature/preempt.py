"""Be stopped by a scheduler, and continue when submitted again.

A run that knows which signals mean "leave" (`save_on_signal`) finishes its step when one comes to any rank, saves on all ranks together,
and ends with status 75, "try again later". The same command continues with the next batch. Here rank 1 sends the signal to itself at
its 20th step; a scheduler would send it from outside.

    accelerate launch --cpu --num_processes 2 examples/by_feature/preempt.py  # status 75
    accelerate launch --cpu --num_processes 2 examples/by_feature/preempt.py

Prints: preempted by SIGTERM, resumed from a checkpoint, 57 steps taken in two runs: True
"""

import os
import signal

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

EPOCHS = 3


class Progress:
    """Counts optimizer steps; saved and loaded with the checkpoint."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict) -> None:
        self.steps = state["steps"]


def main() -> None:
    project = ProjectConfiguration(
        "out/preempt", automatic_checkpoint_naming=True, total_limit=2, save_on_signal=["SIGTERM", "SIGUSR1"]
    )
    accelerator = Accelerator(project_config=project)
    set_seed(0)
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=48, shuffle=True))
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    # The first start finds no checkpoint and begins; the next one continues.
    first_start = accelerator.load_state(latest=True, missing_ok=True) is None
    steps_before = progress.steps
    accelerator.print("first start" if first_start else f"continuing after step {steps_before}")

    for _ in range(loader.iteration, EPOCHS):
        for images, targets in loader:  # asked for the next batch after a signal, the loader saves and leaves
            loss = nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.steps += 1
            if first_start and progress.steps == 20 and accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    shown = steps_before >= 20 and progress.steps == EPOCHS * len(loader)
    accelerator.print(
        f"preempted by SIGTERM, resumed from a checkpoint, {progress.steps} steps taken in two runs: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
