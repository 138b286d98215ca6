"""Saving models and objects: shards, names, content."""

import pathlib
from collections.abc import Iterator
from typing import Any

import safetensors.torch
import torch

from accelerate import Accelerator
from interop.differential.core import probe
from interop.differential.probes.checkpoints import BOTH, PUBLIC, attempt, content, files, model, together


@probe(
    PUBLIC,
    processes=BOTH,
    kind=["plain", "tied", "half"],
    safe=[True, False],
    size=["10GB", "1KB", "40B", 100, 10**6, "x", "", 0],
)
@together
def whole_model(kind: str, safe: bool, size: Any) -> Iterator[tuple[str, Any]]:
    """`save_model`: shards, their names, index and content."""
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(model(kind)) if kind != "half" else model(kind)
    yield "returned", attempt(accelerator.save_model, net, "folder", max_shard_size=size, safe_serialization=safe)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        yield "files", files("folder")
        yield "content", {name: content(pathlib.Path("folder") / name) for name in files("folder")}


@probe(PUBLIC, folder=["a/b/c", "file", "", None], what=["model", "none", "state"])
def model_places(folder: Any, what: str) -> Iterator[tuple[str, Any]]:
    accelerator = Accelerator(cpu=True)
    pathlib.Path("file").write_text("x")
    given = {"model": model(), "none": None, "state": model().state_dict()}[what]
    yield "returned", attempt(accelerator.save_model, given, folder)
    yield "files", files()


@probe(
    PUBLIC,
    before=[
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "other.txt",
        "model.safetensors.index.json",
    ],
    size=["10GB", "40B"],
)
def model_over(before: str, size: str) -> Any:
    """Saving into a folder that holds files."""
    pathlib.Path("folder").mkdir()
    pathlib.Path("folder", before).write_text("old")
    Accelerator(cpu=True).save_model(model(), "folder", max_shard_size=size)
    return files("folder"), pathlib.Path("folder", before).exists() and pathlib.Path(
        "folder", before
    ).read_bytes() == b"old"


OBJECTS = {
    "state": lambda: model().state_dict(),
    "tensor": lambda: torch.arange(3),
    "dict": lambda: {"a": torch.ones(2), "b": [1, "x"]},
    "text": lambda: "word",
    "none": lambda: None,
    "numbers": lambda: {"a": 1},
}


@probe(PUBLIC, processes=BOTH, what=OBJECTS, safe=[True, False], name=["out.bin", "out.safetensors", "deep/out.bin"])
@together
def save(what: Any, safe: bool, name: str) -> Iterator[tuple[str, Any]]:
    accelerator = Accelerator(cpu=True)
    yield "returned", attempt(accelerator.save, what, name, safe_serialization=safe)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and files():
        read = safetensors.torch.load_file if safe else torch.load
        yield "content", attempt(lambda: read(name))
