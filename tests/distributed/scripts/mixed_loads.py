"""A run that saves to one place again and again, and one that loads from there: each load must be of one save.

Each save has one number in the weights, the optimizer and a registered object. Usage: save|load FOLDER HOW LOADS, where HOW is
`path` (the same folder is saved and loaded) or `latest` (checkpoints are numbered, and the old ones pruned).
"""

import sys
from pathlib import Path

import torch

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


class Counter:
    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def make(folder: Path, how: str):
    naming = {"automatic_checkpoint_naming": True, "total_limit": 1} if how == "latest" else {}
    project = ProjectConfiguration(str(folder), **naming)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    counter = Counter()
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(counter)
    return accelerator, model, optimizer, counter


def main(what: str, folder: Path, how: str, loads: int) -> None:
    accelerator, model, optimizer, counter = make(folder, how)
    place = None if how == "latest" else str(folder / "checkpoint")
    number = 0.0
    if what == "save":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        with torch.no_grad():
            while not (folder / "stop").exists():
                number += 1
                for parameter in model.parameters():
                    parameter.fill_(number)
                    optimizer.state[parameter]["exp_avg"].fill_(number)
                counter.value = number
                accelerator.save_state(place)
                if number == 1:
                    print("saved", flush=True)
        return
    seen, mixed, refused = set(), 0, 0
    for _ in range(loads):
        try:
            accelerator.load_state(place)
        except Exception as error:
            refused += 1
            print(f"{type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            continue
        values = [parameter.detach() for parameter in model.parameters()]
        values += [state["exp_avg"] for state in optimizer.optimizer.state.values()]
        found = {number for value in values for number in (value.min().item(), value.max().item())} | {counter.value}
        mixed += len(found) != 1
        seen |= found
    print(f"loads {loads} saves {len(seen)} mixed {mixed} refused {refused}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
