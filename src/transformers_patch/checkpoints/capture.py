"""What is written with `torch.save` and safetensors' `save_file` while a checkpoint is staged goes into the plan of the save.

So a file is hashed while it is written, by the rank that has it, and in the background a copy of it is written. Of what is written in
another way, or with options, nothing changes: it lies in the staged folder, and is hashed there.
"""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import safetensors.torch
import torch

from accelerate.checkpoint.save import SavePlan
from transformers_patch.symbols import shadowed

# Warns at the first save of many.
say_once = functools.cache(logging.getLogger(__name__).warning)

# By these names the callbacks of transformers keep whether they upload checkpoints.
_UPLOADS = ("_log_model", "_log_artifacts", "_log_checkpoints", "_should_upload_checkpoint", "sync_checkpoints")
Stamp = tuple[int, int, int]  # of a file: which it is, its size, when it was written


@contextlib.contextmanager
def into(plan: SavePlan, waits: bool) -> Iterator[dict[str, Stamp]]:
    """Let a plan take the files of its folder that are saved in a block, and give the stamps of those that it wrote.

    It writes each at once, or `waits` for the call that writes.
    """
    stamps: dict[str, Stamp] = {}
    save, save_file = torch.save, safetensors.torch.save_file

    def name_of(path: Any) -> str | None:
        if not isinstance(path, (str, os.PathLike)):
            return None
        name = os.path.relpath(os.path.realpath(path), os.path.realpath(plan.folder))
        return None if name.startswith("..") else name.replace(os.sep, "/")

    def written(name: str) -> None:
        if not waits:
            plan.write_file(name)
            stamps[name] = _stamp(plan, name)

    def take_object(obj: Any, f: Any, *rest: Any, **options: Any) -> None:
        if rest or options or (name := name_of(f)) is None:
            save(obj, f, *rest, **options)
        else:
            plan.add_object(name, obj)
            written(name)

    def take_tensors(tensors: Any, filename: Any, metadata: Any = None) -> None:
        if (name := name_of(filename)) is None:
            save_file(tensors, filename, metadata)
        else:
            plan.add_tensors(name, tensors, metadata=metadata)
            written(name)

    with contextlib.ExitStack() as stack:
        stack.enter_context(shadowed(torch, save=take_object))
        for module in [*sys.modules.values()]:  # libraries import the function, by one of two names
            for name in ("save_file", "safe_save_file"):
                if getattr(module, "__dict__", {}).get(name) is save_file:
                    stack.enter_context(shadowed(module, **{name: take_tensors}))
        yield stamps


def _stamp(plan: SavePlan, name: str) -> Stamp:
    found = os.stat(os.path.join(plan.folder, *name.split("/")))
    return found.st_ino, found.st_size, found.st_mtime_ns


def look_again(plan: SavePlan, stamps: dict[str, Stamp]) -> None:
    """Leave to the leader what was written again in another way since, by a callback or a subclass. Any rank, alone."""
    for name in [name for name, stamp in stamps.items() if _stamp(plan, name) != stamp]:
        plan.forget(name)


def reader_among(callbacks: list[Any], base: type) -> str | None:
    """Return the name of a callback whose `on_save` may read what was saved: a user's, or one of transformers that uploads."""
    for callback in callbacks:
        kind = type(callback)
        if kind.on_save is base.on_save:
            continue
        settings = [vars(callback)[name] for name in _UPLOADS if name in vars(callback)]
        if not settings or any(getattr(setting, "is_enabled", setting) for setting in settings):
            return kind.__name__
    return None
