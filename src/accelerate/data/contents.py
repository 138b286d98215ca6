"""Search for objects inside a dataset, such as divided streams."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

# Limits of the search, which datasets with many files or a tokenizer would make expensive.
_DEEPEST, _MOST_ITEMS, _MOST_OBJECTS = 5, 64, 2000
_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, torch.Tensor, torch.nn.Module, np.ndarray)
# Packages whose objects hold no dataset of the user's in their attributes.
OPAQUE = frozenset(
    {"datasets", "transformers", "tokenizers", "numpy", "pyarrow", "logging", "threading", "multiprocessing"}
)


def reachable(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and the objects inside it: in attributes, containers, closures and partial functions."""
    pending, seen = [(dataset, 0)], {}
    while pending and len(seen) < _MOST_OBJECTS:
        value, depth = pending.pop(0)
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen[id(value)] = value
        if not isinstance(value, (list, tuple, set, Mapping)):
            yield value
        if depth < _DEEPEST:
            pending += [(inner, depth + 1) for inner in _inside(value)]


def _inside(value: Any) -> list[Any]:
    """Return the objects that a value holds directly."""
    if isinstance(value, (Mapping, list, tuple, set, functools.partial, FunctionType, MethodType)):
        return list(islice(references(value), _MOST_ITEMS))
    if type(value).__module__.partition(".")[0] in OPAQUE:
        return []
    slots = (getattr(value, name, None) for name in getattr(type(value), "__slots__", ()) if isinstance(name, str))
    return [*getattr(value, "__dict__", {}).values(), *slots]


def references(value: Any) -> Iterable[Any]:
    """Return the objects that a container or a callable refers to directly."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, Set)):
        return value
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return *cells, *(value.__defaults__ or ())
    if callable(value) and not isinstance(value, (type, torch.nn.Module)):
        return getattr(value, "__dict__", {}).values()
    return ()
