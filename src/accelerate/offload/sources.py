"""Checkpoints as a set of named weights in files, opened and checked before anything is done with them."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate.offload.bnb_parameters import FOUR_BIT, scales_name
from accelerate.offload.mapped import TorchFile, WeightFile, open_weights
from accelerate.utils.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

Path_ = str | os.PathLike

# A message names this many of what is wrong, and counts the rest.
_SHOWN = 8


@dataclass(frozen=True)
class Entry:
    """A weight in a file.

    Attributes:
        file: The file.
        key: Its name there.
        shape: Its shape.
        dtype: Its dtype there.
    """

    file: WeightFile
    key: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in the file."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def in_place(self) -> bool:
        """Whether it can be read from the file whenever it is needed, so that it need not be kept elsewhere."""
        return not isinstance(self.file, TorchFile)

    def tensor(self) -> torch.Tensor:
        """Return it on the CPU, as a view of the file."""
        return self.file.tensor(self.key)

    def reference(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return an entry for an offload index that reads it in place.

        Args:
            dtype: What it is cast to when it is read.
        """
        return {
            "safetensors_file": os.path.abspath(self.file.path),
            "weight_name": self.key,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(self.shape),
        }


def checkpoint_files(checkpoint: Path_) -> list[str]:
    """Return the files that hold the weights of a checkpoint.

    Args:
        checkpoint: A file with a state dict, an index (any ``*.json``), or a folder with one of: a `model.safetensors`, a
            `pytorch_model.bin`, a single ``*.index.json``.

    Raises:
        FileNotFoundError: The index names files that are not there.
        ValueError: It is none of these, or a folder with several index files.
    """
    return list(_located(checkpoint))


def _located(checkpoint: Path_) -> dict[str, list[str]]:
    """The files of a checkpoint, each with the names that an index says are in it."""
    path = Path(checkpoint)
    if path.is_dir():
        for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
            if (path / name).is_file():
                return {str(path / name): []}
        indices = sorted(path.glob("*.index.json"))
        if len(indices) != 1:
            found = "none" if not indices else ", ".join(index.name for index in indices)
            raise ValueError(
                f"The folder {path} is not a checkpoint: it must hold {SAFE_WEIGHTS_NAME}, {WEIGHTS_NAME} or exactly one "
                f"`.index.json` file (found: {found})."
            )
        path = indices[0]
    if not path.is_file():
        raise ValueError(
            f"checkpoint={os.fspath(checkpoint)!r} does not exist. Give a file with a state dict, the index of a sharded "
            "checkpoint, or a folder with either."
        )
    return _indexed(path) if path.suffix == ".json" else {str(path): []}


def _indexed(path: Path) -> dict[str, list[str]]:
    try:
        content = json.loads(path.read_text("utf-8"))
        weight_map = content.get("weight_map", content)
        files: dict[str, list[str]] = {name: [] for name in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            files[file].append(name)
        missing = [file for file in files if not (path.parent / file).is_file()]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no index of a sharded checkpoint: {error}.") from error
    if missing:
        raise FileNotFoundError(
            f"{path} names {len(files)} files, of which {len(missing)} are not in {path.parent}: {listed(missing)}. Copy or "
            "download them again."
        )
    return {str(path.parent / file): names for file, names in files.items()}


def open_checkpoint(checkpoint: Path_) -> dict[str, Entry]:
    """Open every file of a checkpoint and return its weights by name. No weight is read yet.

    Args:
        checkpoint: As for `checkpoint_files`.

    Raises:
        FileNotFoundError: A file is missing.
        OSError: The metadata of a file names an unknown format.
        ValueError: A file is truncated, or lacks what the index says is in it.
    """
    entries: dict[str, Entry] = {}
    for path, expected in _located(checkpoint).items():
        file = open_weights(path)
        for key, (shape, dtype) in file.describe().items():
            entries[key] = Entry(file, key, shape, dtype)
        absent = [name for name in expected if name not in entries]
        if absent:
            raise ValueError(
                f"{path} lacks weights that the checkpoint's index says are in it: {listed(absent)}. The files and the index "
                "belong to different checkpoints; copy or download them again."
            )
    return entries


def files_of(entries: Mapping[str, Entry]) -> list[WeightFile]:
    """Return the files that weights are in, each once.

    Args:
        entries: Weights by name.
    """
    return list({id(entry.file): entry.file for entry in entries.values()}.values())


def listed(names: Iterable[str], most: int = _SHOWN) -> str:
    """Return names for a message: the first few, and how many more there are.

    Args:
        names: The names.
        most: How many are shown.

    Example:
        >>> listed(["a", "b", "c"], 2)
        'a, b and 1 more'
    """
    found = list(names)
    shown = ", ".join(found[:most])
    return f"{shown} and {len(found) - most} more" if len(found) > most else shown


def check_fit(tensors: Mapping[str, torch.Tensor], entries: Mapping[str, Entry], where: str) -> None:
    """Check that weights fit the tensors that they are for, before any of them is placed.

    Args:
        tensors: The model's parameters and buffers by name.
        entries: The weights by name; those that the model does not have are not looked at.
        where: What the weights are of, for the message.

    Raises:
        ValueError: Shapes differ, or integers stand where the model has floating-point parameters, or the other way round.
    """
    problems = []
    for name, tensor in tensors.items():
        entry = entries.get(name)
        if entry is None or type(tensor).__name__ in FOUR_BIT:
            continue
        if entry.shape != tensor.shape:
            problems.append(f"{name} has shape {tuple(entry.shape)}, the model {tuple(tensor.shape)}")
        elif isinstance(tensor, nn.Parameter) and _is_other_kind(entry, tensor, entries, name):
            problems.append(f"{name} is {entry.dtype}, the model's parameter {tensor.dtype}")
    if problems:
        raise ValueError(
            f"{where} does not belong to this model, which is left as it was: {listed(problems)}. Check the model's "
            "configuration; quantised weights need the quantised model."
        )


def _is_other_kind(entry: Entry, tensor: torch.Tensor, entries: Mapping[str, Entry], name: str) -> bool:
    """Whether a cast would change what the numbers mean: of quantised weights without their scales, for example."""
    if entry.dtype is torch.int8 and scales_name(name) in entries:
        return False
    real = entry.dtype.is_floating_point or entry.dtype.is_complex
    return real != (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
