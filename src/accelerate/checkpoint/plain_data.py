"""Walks of nested states: find values that `load_state` would refuse, replace those that torch's careful reader cannot read, and copy."""

import collections
import copy
import datetime
import decimal
import fractions
import io
import pathlib
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from accelerate.checkpoint import torch_files

# Kinds of values that torch's careful reader reads for certain as they are pickled.
_COMMON: frozenset[type] = frozenset((bool, float, complex, str, bytes, bytearray, type(None)))
_COMMON |= {datetime.date, datetime.timedelta, datetime.timezone, decimal.Decimal, fractions.Fraction}
_COMMON |= {type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath}
# Pickles of integers with more bits have an instruction that it does not know.
_LONG_INT = 2000
# The usual ones of them.
_USUAL: frozenset[type] = frozenset((str, float, bool, bytes, type(None)))
# Numpy's numbers and texts.
_NUMPY_KINDS = "biufcSU"


class _Call:
    """Is pickled as a call that builds a value. Torch's careful reader cannot fill a deque, for example, but builds a filled one."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


# Arguments of the calls.
_CALLS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    collections.Counter: lambda value: (dict(value),),
    collections.defaultdict: lambda value: (value.default_factory, dict(value)),
    collections.deque: lambda value: (list(value), value.maxlen),
    frozenset: lambda value: (list(value),),
    int: lambda value: (hex(value), 16),
    range: lambda value: (value.start, value.stop, value.step),
    set: lambda value: (list(value),),
    slice: lambda value: (value.start, value.stop, value.step),
    uuid.UUID: lambda value: (value.hex,),
}


def _uncommon(state: Any, ignores_tensors: bool) -> Iterator[tuple[str, Any]]:
    """Yield the values and keys in nested containers that torch's careful reader may not read as they are pickled, each with its path.

    It ignores plain tensors without attributes, or all tensors.
    """
    waiting, seen = collections.deque([("state", state)]), set()
    while waiting:
        path, value = waiting.popleft()
        kind = type(value)
        parts: tuple[
            tuple[str, str, Iterable[tuple[Any, Any]]], ...
        ] = ()  # of a container, with the text around each name
        if kind in (torch.Tensor, nn.Parameter) and not vars(value):
            continue
        if id(value) in seen or (ignores_tensors and isinstance(value, torch.Tensor)):
            continue
        seen.add(id(value))
        if kind in (list, tuple, collections.deque):
            parts = ((f"{path}[", "]", enumerate(value)),)
        elif kind in (dict, OrderedDict, collections.defaultdict, collections.Counter):
            parts = (("the key ", f" of {path}", zip(value, value, strict=True)), (f"{path}[", "]", value.items()))
            if kind is collections.defaultdict:
                waiting.append((f"{path}.default_factory", value.default_factory))
            if kind is OrderedDict and vars(value):  # a state dict has its version there
                waiting.append((f"vars({path})", vars(value)))
        elif kind in (set, frozenset):
            waiting += [(f"an item of {path}", part) for part in value]
        elif kind is slice:
            waiting += [(f"{path}.{end}", getattr(value, end)) for end in ("start", "stop", "step")]
        if kind in _CALLS or not (parts or kind in _COMMON):
            yield path, value
        for before, after, named in parts:
            for name, part in named:
                kind = type(part)
                if not (kind in _COMMON or (kind is int and part.bit_length() < _LONG_INT)):
                    waiting.append((f"{before}{name!r:.80}{after}", part))


# -- what is refused ---------------------------------------------------------------------------------------------------


def refuse_unreadable(states: Mapping[str, Any], ignores_tensors: bool = False) -> None:
    """Raise TypeError for a state with a value that `load_state` does not read.

    Args:
        states: States by what an error calls their owners.
        ignores_tensors: The tensors are written in a way that takes every kind of them.
    """
    for owner, state in states.items():
        if (found := unreadable(state, ignores_tensors)) is not None:
            path, kind = found
            raise TypeError(
                f"Cannot save the state of {owner}: it has a {kind} at {path}, which load_state does not read by default. Return plain "
                "values from state_dict(): tensors, numbers, texts, dates, paths, and containers of them; the .value of an enum. For "
                "classes that you trust, call torch.serialization.add_safe_globals([...]) with them before you save and load."
            )


def unreadable(state: Any, ignores_tensors: bool = False) -> tuple[str, str] | None:
    """Return the path and the type of the first value that `load_state` would refuse, None if it reads all of them."""
    for path, value in _uncommon(state, ignores_tensors):
        if type(value) not in _CALLS and not _loads(value):
            return path, (value if isinstance(value, type) else type(value)).__qualname__
    return None


def _loads(value: Any) -> bool:
    """Return whether a value of numpy, a time, or one that is tried is read as what it is."""
    if isinstance(value, np.generic) or type(value) is np.ndarray:
        if value.dtype.kind in _NUMPY_KINDS:
            return True
    elif type(value) in (datetime.datetime, datetime.time) and type(value.tzinfo) in (type(None), datetime.timezone):
        return True
    try:
        memory = io.BytesIO()
        torch.save(value, memory)
        memory.seek(0)
        return type(torch_files.load(memory, "cpu")) is type(value)
    except Exception:
        return False


# -- what is replaced --------------------------------------------------------------------------------------------------


def plain(state: Any) -> Any:
    """Return a state that is pickled as torch's careful reader can read it, with Python's numbers for numpy's."""
    for _, value in _uncommon(state, ignores_tensors=True):
        if type(value) in _CALLS or isinstance(value, np.generic):
            return _replaced(state)
    return state


def _replaced(state: Any) -> Any:
    calls: dict[int, _Call] = {}

    def change(value: Any) -> Any:
        kind = type(value)
        if isinstance(value, np.generic):
            return value.item() if value.dtype.kind in _NUMPY_KINDS else value
        if kind not in _CALLS:
            return value
        if id(value) not in calls:
            calls[id(value)] = _Call(kind, rebuilt(_CALLS[kind](value), change))
        return calls[id(value)]

    return rebuilt(state, change)


def rebuilt(state: Any, change: Callable[[Any], Any], copies: dict[int, Any] | None = None) -> Any:
    """Return a state of the same nested containers, which may contain itself, with its values changed, but for usual numbers and texts."""
    copies = {} if copies is None else copies
    kind = type(state)
    if kind in _USUAL or (kind is int and state.bit_length() < _LONG_INT):
        return state
    if id(state) in copies:
        return copies[id(state)]
    if kind in (dict, OrderedDict):
        mapping = copies[id(state)] = kind()
        for key, value in state.items():
            key = key if isinstance(key, torch.Tensor) else rebuilt(key, change, copies)
            mapping[key] = rebuilt(value, change, copies)
        if kind is OrderedDict and vars(state):  # a state dict has its version there
            vars(mapping).update(rebuilt(vars(state), change, copies))
        return mapping
    if kind is list:
        values = copies[id(state)] = []
        values.extend([rebuilt(value, change, copies) for value in state])
        return values
    if kind is tuple:
        return tuple([rebuilt(value, change, copies) for value in state])
    return change(state)


def deep_copied(obj: Any) -> Any:
    """A copy of an object of any kind, as what is saved would come back."""
    try:
        return copy.deepcopy(obj)
    except RuntimeError:  # tensors that are results of a computation refuse, but can be saved
        memory = io.BytesIO()
        torch.save(obj, memory)
        memory.seek(0)
        return torch.load(memory, weights_only=False)  # written here a moment ago
