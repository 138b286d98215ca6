"""Files of `torch.save` and safetensors' `save_file` during the staging of a checkpoint become part of the save's plan.

So the rank that has a file hashes it while it is written, and in the background a copy is written. Files written in another
way, or with options, are not changed: they are in the staged folder, and are hashed there.
"""

import contextlib
import functools
import logging
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any

import safetensors.torch
import torch
import transformers.trainer

from accelerate.checkpoint import manifest
from accelerate.checkpoint.save import SavePlan
from accelerate.runtime import durable
from transformers_patch.symbols import shadowed

# Warns at the first save of many.
say_once = functools.cache(logging.getLogger(__name__).warning)

# By these names the callbacks of transformers keep whether they upload checkpoints.
_UPLOADS = ("_log_model", "_log_artifacts", "_log_checkpoints", "_should_upload_checkpoint", "sync_checkpoints")
# Methods of a Trainer that write a checkpoint.
_WRITERS = (
    "_save_checkpoint", "_save", "save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state",
    "_rotate_checkpoints",
)  # fmt: skip
Stamp = tuple[int, int, int]  # of a file: which it is, its size, when it was written


@contextlib.contextmanager
def into(plan: SavePlan, waits: bool) -> Iterator[dict[str, Stamp]]:
    """Let a plan take the files of its folder that are saved in a block, and return the stamps of those that it wrote.

    It writes each at once, or `waits` for the writing call. If ranks write files of one name, the last writer's counts.
    """
    stamps: dict[str, Stamp] = {}

    @contextlib.contextmanager
    def create(name: str) -> Iterator[durable.HashedFile]:
        with durable.durable(os.path.join(plan.folder, name), writer=plan.rank) as file:
            yield file
        stamps[name] = _stamp(file.status)

    plan.create, plan.sync = create, lambda names: None  # a durable file is on the disk
    save, save_file = torch.save, safetensors.torch.save_file

    def name_of(path: Any) -> str | None:
        if not isinstance(path, (str, os.PathLike)):
            return None
        name = os.path.relpath(os.path.realpath(path), os.path.realpath(plan.folder))
        return None if name.startswith("..") else name.replace(os.sep, "/")

    def written(name: str) -> None:
        if not waits:
            plan.write_file(name)

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


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns


def stamps_below(folder: str) -> dict[str, Stamp]:
    """Return the stamps of the regular files below a folder, by name; none without a folder."""
    stamps = {}
    for name in filter(durable.is_inside, manifest.files_below(folder)):
        with contextlib.suppress(OSError):  # it was removed just now
            status = os.stat(os.path.join(folder, name))
            if stat.S_ISREG(status.st_mode):
                stamps[name] = _stamp(status)
    return stamps


def look_again(plan: SavePlan, stamps: dict[str, Stamp]) -> None:
    """Leave to the leader the files that a subclass or another rank has written again. Any rank, after all have written."""
    present = stamps_below(plan.folder)
    for name in [name for name, stamp in stamps.items() if present.get(name) != stamp]:
        plan.forget(name)


def is_foreign(function: Any) -> bool:
    """Return whether a function is a project's, not one of transformers or of this package."""
    module = getattr(function, "__module__", None) or ""
    return function is not None and module.partition(".")[0] not in ("transformers", "transformers_patch")


def reader_among(trainer: Any, base: type) -> str | None:
    """Return the name of what may read files of a save: a method of a project, or the `on_save` of a callback of a user or that uploads."""
    for kind in type(trainer).__mro__:
        for name in _WRITERS:
            if is_foreign(vars(kind).get(name)) or is_foreign(vars(trainer).get(name)):
                return f"{kind.__name__}.{name}"
    if is_foreign(getattr(transformers.trainer, "rotate_checkpoints", None)):
        return "rotate_checkpoints"
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if kind.on_save is base.on_save:
            continue
        settings = [vars(callback)[name] for name in _UPLOADS if name in vars(callback)]
        if not settings or any(getattr(setting, "is_enabled", setting) for setting in settings):
            return f"{kind.__name__}.on_save"
    return None
