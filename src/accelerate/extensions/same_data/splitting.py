"""Streams that keep the part of one process only when they are read, which their attributes do not tell."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

from accelerate.base._warn import warn_user
from accelerate.data.contents import OPAQUE, reachable

# Functions of `datasets` and WebDataset that keep the part of one process.
_SPLITTERS = frozenset({"split_dataset_by_node", "split_by_node"})


def warn_of_double_division(stream: Any) -> None:
    """Warn of a stream that is divided among the processes, and whose code divides it again."""
    if any(_calls(part, _SPLITTERS) for part in reachable(stream)):
        warn_user(
            f"{type(stream).__name__} calls split_dataset_by_node or split_by_node, and its samples are divided among the processes again: "
            "most of them would not be read. Pass DataLoaderConfiguration(shard_iterable_dataset=False) if each process "
            "reads its own part of the data; or do not split the data."
        )


def _calls(value: Any, names: frozenset[str]) -> bool:
    """Return whether a function, or a method of an object's class, uses one of these names."""
    if isinstance(value, FunctionType):
        return _uses(value.__code__, names)
    foreign = ("torch", "builtins", *OPAQUE)
    kinds = [kind for kind in type(value).__mro__ if kind.__module__.partition(".")[0] not in foreign]
    methods = [method for kind in kinds for method in vars(kind).values() if isinstance(method, FunctionType)]
    return any(_uses(method.__code__, names) for method in methods)


def _uses(code: CodeType, names: frozenset[str]) -> bool:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return not names.isdisjoint(code.co_names) or any(_uses(const, names) for const in inner)
