"""One replaced symbol of transformers: the expected shape of its code, and its restoration. `checkpoints` and `losses` list theirs."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from transformers_patch.registry import Finding
from transformers_patch.training_args import Strategy, names_in


@dataclass(frozen=True)
class Patch:
    """One symbol, and its replacement.

    Attributes:
        owner: The class that has it; empty for a function of the module.
        name: Its name.
        parameters: Its first parameters.
        reads: Names that its code must read, because the replacement acts on them.
        replacement: Returns the replacement of the function that it gets.
        fixed: A part of a name that its code reads in a release with the fix, which must not be applied twice.
    """

    owner: str
    name: str
    parameters: tuple[str, ...]
    reads: tuple[str, ...]
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
    mended: str = ""

    def examine(self, module: ModuleType) -> Finding:
        """Compare the symbol of a module with the shape that the replacement relies on."""
        function = vars(self._owner(module) or object).get(self.name)
        if not inspect.isfunction(function):
            return Finding((f"{self.owner or module.__name__} has no function {self.name}",), needed=True)
        function = inspect.unwrap(function)
        problems = []
        if tuple(inspect.signature(function).parameters)[: len(self.parameters)] != self.parameters:
            expected = ", ".join(self.parameters)
            problems.append(f"{self.name} takes {inspect.signature(function)}, not ({expected}, ...)")
        names = names_in(function.__code__)
        if missing := [name for name in self.reads if name not in names]:
            problems.append(f"{self.name} does not use {', '.join(missing)}")
        if self.mended and (already := sorted(name for name in names if self.mended in name)):
            problems.append(f"{self.name} has the repair already, or another one: it uses {', '.join(already)}")
        return Finding(tuple(problems), needed=True)

    def install(self, module: ModuleType, strategy: Callable[[], Strategy], undo: ExitStack) -> None:
        """Put the replacement in place; `undo` takes what puts the original back."""
        owner = self._owner(module)
        original = vars(owner)[self.name]
        undo.callback(setattr, owner, self.name, original)
        setattr(owner, self.name, functools.wraps(original)(self.replacement(original)))

    def _owner(self, module: ModuleType) -> Any:
        return getattr(module, self.owner, None) if self.owner else module


@contextmanager
def shadowed(obj: Any, **values: Any) -> Iterator[None]:
    """Let attributes of an object be others for a block, whatever its class has."""
    former = {name: vars(obj)[name] for name in values if name in vars(obj)}
    vars(obj).update(values)
    try:
        yield
    finally:
        vars(obj).update(former)  # at once: of a module other threads may look the name up
        for name in values.keys() - former.keys():
            vars(obj).pop(name, None)
