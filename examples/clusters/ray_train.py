"""Ray Train starts workers that use an Accelerator; a worker is killed, and the run continues with fewer.

`TorchTrainer` places workers on the cluster's machines and starts their process group; `Accelerator()` takes part in it unchanged. Rank 0
reports a checkpoint of `save_state` with `ray.train.report`, and Ray keeps it. Here rank 1 is killed on the way. The same run is then
fitted again with one worker: `get_checkpoint` gives the newest checkpoint, `load_state` continues with the next sample, and the
global batch stays what it was. On several machines the folder must be one that all of them see.

    python examples/clusters/ray_train.py

Prints: worker killed after 12 of 28 steps on 2 workers, continued with 1, same curve as one process: True
"""

import argparse
import os
import pathlib
import signal
import tempfile
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

GLOBAL_BATCH, STEPS, KILLED_AFTER, SAVE_EVERY = 64, 28, 12, 5


class Losses:
    """The losses so far; saved and loaded with everything else."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, list[float]]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.values = list(state["values"])


def make_parts() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """Return the model, its optimizer and the data, equal in all processes."""
    set_seed(0)
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, TensorDataset(pixels[: STEPS * GLOBAL_BATCH], labels[: STEPS * GLOBAL_BATCH])


def train(config: dict[str, Any]) -> None:
    """Train on one Ray worker of the run, from the newest checkpoint that was reported."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model, optimizer, rows = make_parts()
    # Fewer workers, larger parts: the global batch stays.
    loader = DataLoader(rows, batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = Losses()
    accelerator.register_for_checkpointing(losses)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            accelerator.load_state(folder)
    begun_at = len(losses.values)
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.values.append(accelerator.reduce(loss.detach(), "mean").item())
        step = len(losses.values)
        if step % SAVE_EVERY == 0 or step == STEPS:
            folder = pathlib.Path(config["staging"], f"step_{step}")
            accelerator.save_state(folder)  # all ranks, into one folder
            reported = Checkpoint.from_directory(folder) if accelerator.is_main_process else None
            metrics = {"losses": losses.values, "begun_at": begun_at, "workers": accelerator.num_processes}
            ray.train.report(metrics, checkpoint=reported)  # all ranks
        if config["kill"] and step == KILLED_AFTER and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(workers: int, kill: bool, folder: pathlib.Path) -> dict[str, Any]:
    """Fit the run with so many workers; the same name and folder continue it. Return what was reported last."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"kill": kill, "staging": str(folder / f"staging_{workers}")},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name="digits", storage_path=str(folder), failure_config=FailureConfig(max_failures=0)),
    )
    return trainer.fit().metrics


def plain_curve() -> list[float]:
    """Return the losses of one process without Ray and without an Accelerator."""
    model, optimizer, rows = make_parts()
    losses = []
    for images, targets in DataLoader(rows, batch_size=GLOBAL_BATCH):
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="a folder that all machines see; default: a temporary one")
    options = parser.parse_args()
    # Each worker imports torch, which takes longer than Ray's minute where all of them share two cores.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
    ray.init(include_dashboard=False)
    folder = (options.out or pathlib.Path(tempfile.mkdtemp(prefix="ray_train_"))).absolute()
    killed = False
    try:
        fit(2, kill=True, folder=folder)
    except ray.train.TrainingFailedError as error:
        killed = True
        print(f"the run failed: {str(error).splitlines()[0]}")
    metrics = fit(1, kill=False, folder=folder)
    curve, expected = torch.tensor(metrics["losses"]), torch.tensor(plain_curve())
    print(
        f"resumed after step {metrics['begun_at']} with {metrics['workers']} worker; last loss {curve[-1]:.4f}, in one process {expected[-1]:.4f}"
    )
    same = len(curve) == STEPS and torch.allclose(curve, expected, atol=1e-4)
    # The newest checkpoint that Ray had taken in by then.
    resumed = metrics["begun_at"] in range(SAVE_EVERY, KILLED_AFTER, SAVE_EVERY)
    shown = killed and resumed and metrics["workers"] == 1 and same
    ray.shutdown()
    print(
        f"worker killed after {KILLED_AFTER} of {STEPS} steps on 2 workers, continued with 1, same curve as one process: {shown}"
    )


if __name__ == "__main__":
    main()
