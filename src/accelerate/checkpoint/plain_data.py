"""Which values of a state cannot be read again as plain data. Any rank, alone."""

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accelerate._warn import warn_user
from accelerate.checkpoint import formats
from accelerate.checkpoint.state import Common
from accelerate.utils import other

# These load for certain; other values are tried.
_PLAIN = frozenset((bool, float, str, bytes, type(None), torch.Tensor, nn.Parameter))
# Pickles of longer integers have an instruction that torch's careful reader does not know.
_LONGEST = 2000


def warn_of_unreadable(common: Common, states: Mapping[str, Any]) -> None:
    """Warn of states, by the names of their files, that `load_state` refuses to read."""
    for obj, file, _ in common.shared():
        if (found := unreadable(formats.plain(states[file]))) is not None:
            path, kind = found
            warn_user(
                f"The state of {type(obj).__name__} ({file}) has a {kind} at {path}, which load_state does not read by default. Return "
                "plain data from state_dict() (lists, dicts, sets, numbers, texts, tensors), or load the checkpoint with "
                "load_kwargs={'weights_only': False}."
            )


def unreadable(state: Any) -> tuple[str, str] | None:
    """Return the path and the type of the first value that `load_state` would refuse, None if it reads all of them."""
    for path, value in _leaves(state, "state", set()):
        try:
            memory = io.BytesIO()
            torch.save(value, memory)
            memory.seek(0)
            other.load(memory, "cpu")
        except Exception:
            return path, type(value).__qualname__
    return None


def _leaves(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the values inside containers, and keys, that may not load."""
    kind = type(value)
    if kind in _PLAIN or (kind is int and value.bit_length() < _LONGEST):
        return
    if kind not in (dict, OrderedDict, list, tuple):
        yield path, value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if kind in (list, tuple):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]", seen)
        return
    for key, inner in value.items():
        yield from _leaves(key, f"the key {key!r:.80} of {path}", seen)
        yield from _leaves(inner, f"{path}[{key!r:.80}]", seen)
