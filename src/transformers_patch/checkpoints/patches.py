"""The symbols of transformers that the checkpoints replace. Each is one entry of the registry, and is put back by itself.

A replacement calls what it replaces: none of the Trainer's code is copied.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from transformers_patch import checkpoints
from transformers_patch.registry import Finding
from transformers_patch.training_args import Strategy, names_in


@dataclass(frozen=True)
class Patch:
    """One symbol, and what takes its place.

    Attributes:
        owner: The class that has it; empty for a function of the module.
        name: Its name.
        parameters: Those that it begins with.
        reads: Names that its code must read, because the replacement acts on them.
        replacement: Returns what takes the place of the function that it gets.
    """

    owner: str
    name: str
    parameters: tuple[str, ...]
    reads: tuple[str, ...]
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]]

    def examine(self, module: ModuleType) -> Finding:
        """Compare the symbol of a module with the shape that the replacement relies on."""
        found = vars(self._owner(module) or object).get(self.name)
        if not inspect.isfunction(found):
            return Finding((f"{self.owner or module.__name__} has no function {self.name}",), needed=True)
        found = inspect.unwrap(found)
        problems = []
        if tuple(inspect.signature(found).parameters)[: len(self.parameters)] != self.parameters:
            expected = ", ".join(self.parameters)
            problems.append(f"{self.name} takes {inspect.signature(found)}, not ({expected}, ...)")
        if missing := [name for name in self.reads if name not in names_in(found.__code__)]:
            problems.append(f"{self.name} does not use {', '.join(missing)}")
        return Finding(tuple(problems), needed=True)

    def install(self, module: ModuleType, strategy: Callable[[], Strategy], undo: ExitStack) -> None:
        """Put the replacement in place; `undo` takes what puts the original back."""
        owner = self._owner(module)
        original = vars(owner)[self.name]
        undo.callback(setattr, owner, self.name, original)
        setattr(owner, self.name, functools.wraps(original)(self.replacement(original)))

    def _owner(self, module: ModuleType) -> Any:
        return getattr(module, self.owner, None) if self.owner else module


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
