"""The smallest model and data that can be trained: a line through points."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate.base import _lazy

__getattr__ = _lazy.aliases("accelerate.test_utils.training")


class RegressionDataset(Dataset):
    """Points near a line.

    Each item is a mapping of "x" and "y", numbers of NumPy (float32).

    Args:
        a: the slope.
        b: the height at 0.
        length: how many points.
        seed: makes the points the same every time.
    """

    __module__ = "accelerate.test_utils.training"  # the path in pickles

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        random = np.random.default_rng(seed)
        self.length = length
        self.x = random.normal(size=(length,)).astype(np.float32)
        noise = random.normal(scale=0.1, size=(length,)).astype(np.float32)
        self.y = (np.float32(a) * self.x + np.float32(b) + noise).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(nn.Module):
    """A line with two parameters, `a` and `b`.

    The first batch after construction prints the number formats, so that a test sees which precision the batch has.

    Args:
        a: the first slope.
        b: the first height at 0.
        double_output: accepted for compatibility; both values give the same.
    """

    __module__ = "accelerate.test_utils.training"  # the path in pickles

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(float(a)))
        self.b = nn.Parameter(torch.tensor(float(b)))
        self.first_batch = True

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """Return the heights of the line at positions `x`, of any shape."""
        if x is None:
            raise ValueError("x is None; pass a tensor of positions.")
        if self.first_batch:
            print(f"Model dtype: {self.a.dtype}, {self.b.dtype}. Input dtype: {x.dtype}")
            self.first_batch = False
        return x * self.a + self.b


_WORDS = ("red", "green", "blue", "old", "new", "small", "large", "warm", "cold", "round")
_TRAIN, _EVALUATE = 36, 12


def _sentences(length: int, seed: int, labels: bool) -> list[dict[str, Any]]:
    """Return pairs of short rows of token ids, equal or not."""
    random = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for index in range(length):
        size = int(random.integers(4, 12))
        row = {"input_ids": random.integers(5, 5 + len(_WORDS), size=size).tolist(), "attention_mask": [1] * size}
        rows.append({**row, "labels": index % 2} if labels else row)
    return rows


def _collate(accelerator: Any, labels: bool) -> Any:
    multiple = 8 if accelerator.mixed_precision not in ("no", None) else 1

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        longest = -(-longest // multiple) * multiple
        batch = {
            key: torch.tensor([row[key] + [0] * (longest - len(row[key])) for row in rows])
            for key in ("input_ids", "attention_mask")
        }
        batch["labels"] = torch.tensor([row["labels"] for row in rows]) if labels else batch["input_ids"].clone()
        return batch

    return collate


def _loaders(accelerator: Any, batch_size: int, labels: bool) -> tuple[DataLoader, DataLoader]:
    collate = _collate(accelerator, labels)
    train = DataLoader(_sentences(_TRAIN, 1, labels), batch_size=batch_size, shuffle=True, collate_fn=collate)
    evaluate = DataLoader(_sentences(_EVALUATE, 2, labels), batch_size=batch_size, collate_fn=collate)
    return train, evaluate


def mocked_dataloaders(accelerator: Any, batch_size: int = 16) -> tuple[DataLoader, DataLoader]:
    """Return small loaders (training, evaluation) for a classifier of sentences, without any download.

    Batches are mappings of "input_ids", "attention_mask" (both batch x length, int64) and "labels" (batch, int64); the precision of
    the Accelerator decides what lengths are padded to.
    """
    return _loaders(accelerator, batch_size, labels=True)


def mocked_dataloaders_for_autoregressive_models(
    accelerator: Any, batch_size: int = 16
) -> tuple[DataLoader, DataLoader]:
    """Return small loaders for a language model: as `mocked_dataloaders`, with "labels" equal to "input_ids"."""
    return _loaders(accelerator, batch_size, labels=False)
