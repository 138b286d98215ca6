"""Checkpoints as sets of named weights in files, opened and checked before anything is done with them.

A weight is a view of its file, and costs no memory of its own. The kernel reads a page when it is first used, keeps it
while there is room, and drops it when there is none, because the file still has it. Nothing has to be copied to be
offloaded.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from accelerate.offload.placement import FOUR_BIT, scales_name
from accelerate.offload.tensors import listed
from accelerate.utils.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

Path_ = str | os.PathLike

_FOREIGN_FORMATS = ("tf", "flax", "np", "mlx")


class WeightFile:
    """A file of weights, opened once: safetensors, or of `torch.save` with tensors in plain containers alone.

    What is read stays valid while the file is replaced, but not when it is rewritten. ``in_place``: weights can be
    read from it whenever they are needed. FileNotFoundError, OSError (unknown format) or ValueError (truncated, or not
    what its name says).
    """

    def __init__(self, path: Path_) -> None:
        self.path = os.path.abspath(path)  # wherever the process goes later
        if not os.path.isfile(self.path):
            raise FileNotFoundError(f"The file of weights {self.path} does not exist.")
        self.in_place = self.path.endswith(".safetensors")
        try:
            content = safe_open(self.path, framework="pt") if self.in_place else _load_torch(self.path)
        except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
            kind = "safetensors file" if self.in_place else "state dict of torch.save"
            raise ValueError(
                f"{self.path} ({os.path.getsize(self.path):,} bytes) is truncated or no {kind}: "
                f"{str(error).partition(chr(10))[0]}. Copy or download it again."
            ) from error
        if self.in_place:
            check_format(self.path, content.metadata())
        self._read = content.get_tensor if self.in_place else content.__getitem__
        self.keys = dict.fromkeys(content.keys())  # in order, and looked up quickly

    def tensor(self, key: str) -> torch.Tensor:
        """Return a tensor, a view of the file where that can be mapped, never writing to it; KeyError names it."""
        if key not in self.keys:
            raise KeyError(f"{self.path} has no tensor {key!r}; it has {listed(map(repr, self.keys), 5)}.")
        return self._read(key)


def check_format(path: str, metadata: Mapping[str, str] | None) -> None:
    """Refuse a safetensors file by its metadata: ValueError for another framework's, OSError for an unknown format."""
    written_for = (metadata or {}).get("format", "pt")
    if written_for in _FOREIGN_FORMATS:
        raise ValueError(f"{path} was written for {written_for!r}; a model of PyTorch needs a file of format 'pt'.")
    if written_for != "pt":
        raise OSError(
            f"The metadata of {path} names the format {written_for!r}, which is unknown. Save it with "
            "save_file(..., metadata={'format': 'pt'})."
        )


def _load_torch(path: str) -> dict[str, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        # Files of torch before 1.6 are no zip archives and cannot be mapped.
        if "mmap can only be used" not in str(error):
            raise
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it holds a {type(loaded).__name__}")
    return dict(loaded)


@dataclass(frozen=True)
class Entry:
    """A weight in a file: its name there, and the weight on the CPU as a view of the file."""

    file: WeightFile
    key: str
    value: torch.Tensor

    def reference(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return an entry for an offload index that reads the weight in place and casts it to a dtype."""
        return {
            "safetensors_file": self.file.path,
            "weight_name": self.key,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(self.value.shape),
        }


def checkpoint_files(checkpoint: Path_) -> dict[str, list[str]]:
    """Return the files with the weights of a checkpoint, each with the names that an index says are in it.

    A checkpoint is a state dict, an index (any ``*.json``), or a folder with either. FileNotFoundError: files of the
    index are missing. ValueError: it is none of these, or a folder with several indices.
    """
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
    """Open every file of a checkpoint and return its weights by name, unread; raises as `WeightFile` does."""
    entries: dict[str, Entry] = {}
    for path, expected in checkpoint_files(checkpoint).items():
        file = WeightFile(path)
        for key in file.keys:
            tensor = file.tensor(key)
            # Modules may keep extra state in other forms, which only their own `load_state_dict` understands.
            if isinstance(tensor, torch.Tensor):
                entries[key] = Entry(file, key, tensor)
        absent = [name for name in expected if name not in entries]
        if absent:
            raise ValueError(
                f"{path} lacks weights that the checkpoint's index says are in it: {listed(absent)}. The files and the index "
                "belong to different checkpoints; copy or download them again."
            )
    return entries


def check_fit(tensors: Mapping[str, torch.Tensor], entries: Mapping[str, Entry], where: str) -> None:
    """Raise a ValueError where weights have another shape than their tensors, or integers for floating point."""
    problems = []
    for name, tensor in tensors.items():
        if name not in entries or type(tensor).__name__ in FOUR_BIT:
            continue
        value = entries[name].value
        if value.shape != tensor.shape:
            problems.append(f"{name} has shape {tuple(value.shape)}, the model {tuple(tensor.shape)}")
        elif isinstance(tensor, nn.Parameter) and not (value.dtype is torch.int8 and scales_name(name) in entries):
            # A cast would change what the numbers mean: of quantised weights without their scales, for example.
            real = value.is_floating_point() or value.is_complex()
            if real != (tensor.is_floating_point() or tensor.is_complex()):
                problems.append(f"{name} is {value.dtype}, the model's parameter {tensor.dtype}")
    if problems:
        raise ValueError(
            f"{where} does not belong to this model, which is left as it was: {listed(problems)}. Check the model's "
            "configuration; quantised weights need the quantised model."
        )
