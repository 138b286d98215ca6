"""The symbols of transformers that the checkpoints replace. Each is one entry of the registry, and is put back by itself.

A replacement calls what it replaces: none of the Trainer's code is copied.
"""

from collections.abc import Callable
from typing import Any

from transformers_patch import checkpoints
from transformers_patch.symbols import Patch


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    def _save_checkpoint(self: Any, model: Any, trial: Any, *args: Any, **options: Any) -> None:
        from transformers_patch.checkpoints import save

        save.save_checkpoint(self, trial, lambda: original(self, model, trial, *args, **options))

    return _save_checkpoint


def _training(original: Callable[..., Any]) -> Callable[..., Any]:
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        from transformers_patch import engine
        from transformers_patch.checkpoints import save

        def run(folder: Any) -> Any:
            return original(self, folder, *args, **options)

        return save.train(self, resume_from_checkpoint, run, engine.saves_in_background())

    return train


def _building(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        with checkpoints.resumable([*args, *options.values()]):
            original(self, *args, **options)

    return __init__


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_last_checkpoint(folder: Any) -> str | None:
        return checkpoints.get_last_checkpoint(folder)

    return get_last_checkpoint


_WRITES = ("_get_output_dir", "save_model", "_push_from_checkpoint", "save_to_json")
# By the names of their entries in the registry.
PATCHES = {
    "save_checkpoint": Patch("Trainer", "_save_checkpoint", ("self", "model", "trial"), _WRITES, _saving),
    "build": Patch("Trainer", "__init__", ("self", "model", "args"), (), _building),
    "train": Patch("Trainer", "train", ("self", "resume_from_checkpoint"), ("get_last_checkpoint",), _training),
    "last_checkpoint": Patch("", "get_last_checkpoint", ("folder",), ("listdir",), _choosing),
}
