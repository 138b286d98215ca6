"""The symbols of transformers that the checkpoints replace. Each is one entry of the registry, and is restored separately.

A replacement calls the original: none of the Trainer's code is copied.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers_patch import checkpoints
from transformers_patch.symbols import Patch


def _around(hook: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes, of a Trainer's method, one that lets a hook call it."""
    return lambda original: lambda self, *args, **options: hook(partial(original, self), self, *args, **options)


def _newest(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda folder: checkpoints.get_last_checkpoint(folder)


_WRITES = ("_get_output_dir", "save_model", "_push_from_checkpoint", "save_to_json")
# By the names of their entries in the registry.
PATCHES = {
    "save_checkpoint": Patch(
        "Trainer", "_save_checkpoint", ("self", "model", "trial"), _WRITES, _around(checkpoints.save_checkpoint)
    ),
    "build": Patch("Trainer", "__init__", ("self", "model", "args"), (), _around(checkpoints.build)),
    "train": Patch(
        "Trainer", "train", ("self", "resume_from_checkpoint"), ("get_last_checkpoint",), _around(checkpoints.train)
    ),
    "last_checkpoint": Patch("", "get_last_checkpoint", ("folder",), ("listdir",), _newest),
}
