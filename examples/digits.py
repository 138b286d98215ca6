"""A training loop on real data: accumulation, bf16, exact evaluation, checkpoints inside an epoch.

    accelerate launch --cpu --num_processes 2 examples/digits.py
    accelerate launch --cpu --num_processes 2 --mixed_precision bf16 examples/digits.py --gradient_accumulation_steps 2

Stop in the middle and continue from the checkpoint:

    accelerate launch --cpu --num_processes 2 examples/digits.py --checkpoint_dir out/digits --stop_after 60
    accelerate launch --cpu --num_processes 2 examples/digits.py --checkpoint_dir out/digits --resume

`--resume auto` continues if there is something to continue from and begins otherwise: for jobs that are restarted by themselves
(`--max_restarts`, a queue). On several machines the folder must be one that all of them see.

The data are 1,797 grey 8 x 8 scans that come with scikit-learn; a fifth is held out. ``--require-accuracy 0.97`` makes the
exit status return whether the held-out accuracy was reached. ``--double-prepare`` prepares the model a second time, which
changes nothing but a warning.
"""

import argparse
import pathlib
import sys
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed


class DigitNet(nn.Module):
    """Two convolutions and a linear layer: images of shape (batch, 1, 8, 8) in, ten logits a picture out."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 4 * 4, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


class Progress:
    """How many updates were made; saved and restored with everything else through `register_for_checkpointing`."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def make_loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return a shuffled training loader and a loader of the held-out fifth, which is the same on every process."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    train, held_out = train_test_split(range(len(labels)), test_size=0.2, stratify=digits.target, random_state=0)
    training = DataLoader(TensorDataset(pixels[train], labels[train]), batch_size=batch_size, shuffle=True)
    return training, DataLoader(TensorDataset(pixels[held_out], labels[held_out]), batch_size=256)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, int]:
    """Return the accuracy and the number of pictures it was measured on: each held-out picture counts exactly once."""
    model.eval()
    right = seen = 0
    for images, labels in loader:
        guesses, labels = accelerator.gather_for_metrics((model(images).argmax(dim=-1), labels))
        right += (guesses == labels).sum().item()
        seen += len(labels)
    model.train()
    return right / seen, seen


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch_size", type=int, default=32, help="pictures a step on each process")
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], help="default: the launcher's setting")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU although there is an accelerator")
    parser.add_argument("--checkpoint_dir", type=pathlib.Path, help="save here, in the middle of an epoch too")
    parser.add_argument("--save_every", type=int, default=50, help="updates between two checkpoints")
    parser.add_argument("--stop_after", type=int, help="save and stop after this many updates")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="yes",
        choices=["yes", "auto"],
        help="continue from the newest whole checkpoint; auto: if there is one",
    )
    parser.add_argument("--require-accuracy", "--require_accuracy", type=float, metavar="SHARE")
    parser.add_argument("--double-prepare", "--double_prepare", action="store_true", help="prepare the model again")
    options = parser.parse_args()
    if (options.resume or options.stop_after) and not options.checkpoint_dir:
        parser.error("--resume and --stop_after need --checkpoint_dir")
    return options


def train(options: argparse.Namespace) -> float | None:
    """Train, evaluate after each epoch, and return the last accuracy; None when `--stop_after` ended it early."""
    started = time.perf_counter()
    accelerator = Accelerator(
        cpu=options.cpu,
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        project_config=ProjectConfiguration(options.checkpoint_dir, automatic_checkpoint_naming=True, total_limit=3),
    )
    set_seed(options.seed)
    training, held_out = make_loaders(options.batch_size)
    network = DigitNet()
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.learning_rate, weight_decay=1e-2)
    # Counted on the loader as it is before `prepare`: the prepared schedule advances once a process at every update, so
    # this length is right on any number of processes.
    total = -(-len(training) // options.gradient_accumulation_steps) * options.epochs
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    model, optimizer, training, held_out, schedule = accelerator.prepare(
        network, optimizer, training, held_out, schedule
    )
    if options.double_prepare:
        model = accelerator.prepare(accelerator.unwrap_model(model))

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if options.resume:
        folder = accelerator.load_state(latest=True, missing_ok=options.resume == "auto")
        where = f"resumed from {folder}: " if folder else "nothing to resume from: "
        accelerator.print(f"{where}epoch {training.iteration}, update {progress.updates}")

    accuracy = None
    # The prepared loader knows its epoch, and continues with the batch that was next where the checkpoint was saved.
    for epoch in range(training.iteration, options.epochs):
        for images, labels in training:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            progress.updates += 1
            stop = progress.updates == options.stop_after
            if options.checkpoint_dir and (stop or progress.updates % options.save_every == 0):
                accelerator.save_state()
            if stop:
                accelerator.print(f"stopped after {progress.updates} updates")
                accelerator.end_training()
                return None
        accuracy, pictures = evaluate(accelerator, model, held_out)
        accelerator.print(f"epoch {epoch:2d}  loss {loss.item():.4f}  accuracy {accuracy:.4f} on {pictures} pictures")
    if accuracy is None:
        accuracy, _ = evaluate(accelerator, model, held_out)
    accelerator.print(f"processes: {accelerator.num_processes}")
    accelerator.print(f"accuracy on held-out digits: {accuracy:.4f}")
    accelerator.print(f"seconds: {time.perf_counter() - started:.1f}")
    accelerator.end_training()
    return accuracy


def main() -> int:
    options = parse()
    accuracy = train(options)
    if options.require_accuracy and accuracy is not None and accuracy < options.require_accuracy:
        print(f"accuracy {accuracy:.4f} is below the required {options.require_accuracy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
