"""Log a run to trackers: a built-in one by name, and a custom one.

`log_with` takes names ("tensorboard", "wandb", "mlflow", ..., "all" that are installed) and objects; `init_trackers` starts them with the
hyperparameters, `log` writes, `end_training` closes. The main process alone logs, so gather or reduce first. A tracker of your own derives
from `GeneralTracker` and says `name`, `requires_logging_directory` and `tracker`; here it writes JSON lines.

    accelerate launch --cpu --num_processes 2 examples/by_feature/track.py

Prints: 8 losses and the learning rate are in the log of the main process: True
"""

import json
import pathlib
from typing import Any

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed


class JsonLines(GeneralTracker):
    """Writes one JSON object per call of `log` into a file."""

    name = "json_lines"
    requires_logging_directory = True

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.path, self.file = path, None

    @property
    def tracker(self) -> Any:
        return self.file

    @on_main_process
    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("w")

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        self.file.write(json.dumps({"config": values}) + "\n")

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")

    @on_main_process
    def finish(self) -> None:
        self.file.close()


def main() -> None:
    path = pathlib.Path("out/track/losses.jsonl")
    accelerator = Accelerator(log_with=JsonLines(path), project_dir="out/track")  # or ["tensorboard", JsonLines(path)]
    set_seed(0)
    wine = load_wine()
    features = torch.tensor(wine.data, dtype=torch.float32)
    rows = TensorDataset((features - features.mean(dim=0)) / features.std(dim=0), torch.tensor(wine.target))
    model = nn.Linear(13, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=16, shuffle=True))
    accelerator.init_trackers("wine", config={"learning_rate": 0.1, "ranks": accelerator.num_processes})
    for epoch in range(8):
        total = torch.zeros((), device=accelerator.device)
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        mean = accelerator.reduce(total, "mean").item() / len(loader)  # all ranks, then one of them logs
        accelerator.log({"loss": mean}, step=epoch)
    accelerator.end_training()

    if accelerator.is_main_process:
        config, *lines = map(json.loads, path.read_text().splitlines())
        falls = lines[-1]["loss"] < lines[0]["loss"]
        shown = (
            config["config"]["learning_rate"] == 0.1 and [line["step"] for line in lines] == list(range(8)) and falls
        )
        print(f"{len(lines)} losses and the learning rate are in the log of the main process: {shown}")


if __name__ == "__main__":
    main()
