"""Checkpoints for tests, made of the same parts as real ones, but without a run."""

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import torch

from accelerate.checkpoint import formats
from accelerate.checkpoint.manifest import Manifest, model_file


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return weights of several shapes and dtypes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(7, 5, generator=generator),
        "layer.weight": torch.randn(5, 5, generator=generator).to(torch.bfloat16),
        "layer.bias": torch.randn(5, generator=generator),
        "steps": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    }


def write(folder: Path, *, weights=None, safe=True, aliases=None, age=0.0, model=0, **told: object) -> Path:
    """Write a complete checkpoint that is so many seconds old, with fields of the manifest; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = tensors() if weights is None else weights
    file = model_file(model, safe)
    if safe:
        entry = formats.write_safetensors(folder / file, weights, {"format": "pt"}, aliases=aliases)
    else:
        entry = formats.write_torch(folder / file, weights)
    files = {file: entry, "optimizer.bin": formats.write_torch(folder / "optimizer.bin", {"state": {}})}
    created = (datetime.now(timezone.utc) - timedelta(seconds=age)).isoformat(timespec="seconds")
    Manifest(files, created=created, **told).write(folder)
    return folder


def foreign(folder: Path, age: float = 0.0) -> Path:
    """Write a checkpoint as a library without manifests does, and return its folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(), folder / "model.safetensors")
    torch.save({"state": {}}, folder / "optimizer.bin")
    touch(folder, age)
    return folder


def left_behind(folder: Path, name: str, inner: str | None = None, number: int = 0) -> Path:
    """Make the hidden folder of a save or removal of the checkpoint `name` that was killed; return `inner` in it, or that folder."""
    aside = folder / f".saving_{number:016x}"
    (aside / (inner or ".")).mkdir(parents=True)
    (aside / ".accelerate_save").write_text(name)
    return aside / (inner or ".")


def touch(folder: Path, age: float) -> None:
    """Let a folder and all in it look as old as given, in seconds."""
    then = datetime.now().timestamp() - age
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (then, then))


def flip(path: Path, position: int = -1) -> None:
    """Flip the bits of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(bytes(data))
