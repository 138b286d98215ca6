"""Find values of a state that `load_state` would refuse to read."""

import collections
import datetime
import decimal
import fractions
import io
import pathlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from accelerate.checkpoint import formats, torch_files

# These load for certain; other values are tried.
_TENSORS = (torch.Tensor, nn.Parameter)
_PLAIN = frozenset((bool, int, float, complex, str, bytes, bytearray, type(None), range, uuid.UUID))
_PLAIN |= {datetime.date, datetime.timedelta, datetime.timezone, decimal.Decimal, fractions.Fraction}
_PLAIN |= {type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath}
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


def refuse_unreadable(states: Mapping[str, Any]) -> None:
    """Raise TypeError for a state with a value that `load_state` does not read.

    Args:
        states: States by what an error calls their owners.
    """
    for owner, state in states.items():
        if (found := unreadable(state)) is not None:
            path, kind = found
            raise TypeError(
                f"Cannot save the state of {owner}: it has a {kind} at {path}, which load_state does not read by default. Return plain "
                "values from state_dict(): tensors, numbers, texts, dates, paths, and containers of them; the .value of an enum. For "
                "classes that you trust, call torch.serialization.add_safe_globals([...]) with them before you save and load."
            )


def unreadable(state: Any) -> tuple[str, str] | None:
    """Return the path and the type of the first value that `load_state` would refuse, None if it reads all of them."""
    for path, value in _leaves(state, "state"):
        try:
            memory = io.BytesIO()
            torch.save(formats.plain(value), memory)
            memory.seek(0)
            is_read = type(torch_files.load(memory, "cpu")) is type(value)
        except Exception:
            is_read = False
        if not is_read:
            return path, (value if isinstance(value, type) else type(value)).__qualname__
    return None


def _leaves(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values inside containers, and keys, that may not load, each with its path below the name."""
    waiting, seen = collections.deque([(name, state)]), set()
    while waiting:
        path, value = waiting.popleft()
        kind = type(value)
        if kind in _PLAIN or id(value) in seen or (kind in _TENSORS and not vars(value)):
            continue
        seen.add(id(value))
        if kind in (list, tuple, collections.deque):
            waiting += [(f"{path}[{index}]", part) for index, part in enumerate(value) if type(part) not in _PLAIN]
        elif kind in (set, frozenset):
            waiting += [(f"an item of {path}", part) for part in value if type(part) not in _PLAIN]
        elif kind is slice:
            waiting += [(f"{path}.{end}", getattr(value, end)) for end in ("start", "stop", "step")]
        elif kind in _MAPPINGS:
            for key, part in value.items():
                if type(key) not in _PLAIN:
                    waiting.append((f"the key {key!r:.80} of {path}", key))
                if type(part) not in _PLAIN:
                    waiting.append((f"{path}[{key!r:.80}]", part))
            if kind is collections.defaultdict:
                waiting.append((f"{path}.default_factory", value.default_factory))
        elif not _loads(value):
            yield path, value


def _loads(value: Any) -> bool:
    """Return whether a value of numpy, or a time, loads for certain."""
    if isinstance(value, np.generic) or type(value) is np.ndarray:
        return value.dtype.kind in formats.NUMPY_KINDS
    if type(value) in (datetime.datetime, datetime.time):
        return type(value.tzinfo) in (type(None), datetime.timezone)
    return False
