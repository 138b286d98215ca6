"""A small vision transformer: warm-up, clipping, exact evaluation, the best model kept, resuming.

An 8 x 8 picture is 16 patches of 2 x 2 pixels. The loop is that of any image classifier: augmentation in the data set, a schedule that counts
optimizer steps, an evaluation after each epoch, the best weights exported. Stopped by a scheduler's signal it saves, ends with status
75, and continues when it is started again.

    accelerate launch --cpu --num_processes 2 --mixed_precision bf16 examples/vision.py

Prints: accuracy above 0.9 on 360 held-out digits, the exported model has the same: True
"""

import argparse
import math
import pathlib

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

PATCH, SIDE = 2, 8
PATCHES = (SIDE // PATCH) ** 2


class Digits(Dataset):
    """Pictures of shape (1, 8, 8); those for training get some noise."""

    def __init__(self, indices: list[int], noisy: bool) -> None:
        digits = load_digits()
        self.pixels = torch.tensor(digits.images[indices], dtype=torch.float32).unsqueeze(1) / 16
        self.labels, self.noisy = torch.tensor(digits.target[indices]), noisy

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        picture = self.pixels[index]
        if self.noisy:  # random numbers that a data set draws are resumed exactly, too
            picture = picture + 0.1 * torch.randn(picture.shape)
        return picture, self.labels[index]


class VisionTransformer(nn.Module):
    """Patches become tokens; the mean of the last layer's tokens is classified."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn(PATCHES, width) * 0.5)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(pictures).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(tokens).mean(dim=1))


class Best:
    """The best accuracy so far; saved and loaded with everything else."""

    def __init__(self) -> None:
        self.accuracy = 0.0

    def state_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        vars(self).update(state)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, int]:
    """Return the accuracy and the number of pictures; each counts once. Collective: call on every rank."""
    model.eval()
    hits = [
        accelerator.gather_for_metrics(model(pictures).argmax(dim=1) == labels).float() for pictures, labels in loader
    ]
    model.train()
    hits = torch.cat(hits)
    return hits.mean().item(), len(hits)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/vision"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=32, help="pictures of each rank in a step")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    return parser.parse_args()


def main() -> None:
    options = parse()
    project = ProjectConfiguration(
        options.out, automatic_checkpoint_naming=True, total_limit=2, save_on_signal=["SIGTERM", "SIGUSR1"]
    )
    accelerator = Accelerator(project_config=project)
    set_seed(0)
    train, held_out = train_test_split(range(1797), test_size=360, random_state=0)
    loader = DataLoader(Digits(train, noisy=True), batch_size=options.batch_size, shuffle=True)
    evaluation = DataLoader(Digits(held_out, noisy=False), batch_size=128)
    model = VisionTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.05)
    # Lengths of the loader as it is before `prepare`: the prepared schedule advances once per rank at each step.
    steps = options.epochs * len(loader)
    warm_up = steps // 10

    def rate(step: int) -> float:
        """Rise over the first tenth, then fall to zero like a cosine."""
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 + 0.5 * math.cos(math.pi * min((step - warm_up) / (steps - warm_up), 1))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )
    best = Best()
    accelerator.register_for_checkpointing(best)
    accelerator.load_state(latest=True, missing_ok=True)
    for epoch in range(loader.iteration, options.epochs):
        for pictures, labels in loader:
            loss = nn.functional.cross_entropy(model(pictures), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accuracy, pictures_seen = evaluate(accelerator, model, evaluation)
        accelerator.print(f"epoch {epoch:2d}  loss {loss.item():.3f}  accuracy {accuracy:.3f}")
        if accuracy > best.accuracy:  # the same number on all ranks, so all of them save
            best.accuracy = accuracy
            accelerator.save_model(model, options.out / "best")
        accelerator.save_state()

    accelerator.wait_for_everyone()
    alone = VisionTransformer()
    alone.load_state_dict(load_file(options.out / "best" / "model.safetensors"))
    again, pictures_seen = evaluate(accelerator, accelerator.prepare_model(alone, evaluation_mode=True), evaluation)
    shown = best.accuracy > 0.9 and again == best.accuracy
    accelerator.print(
        f"accuracy above 0.9 on {pictures_seen} held-out digits, the exported model has the same: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
