"""Cutting and joining batches: nested structures whose leaves have the samples along their first dimension.

A leaf is a tensor, or a list without tensors inside (`default_collate` leaves strings as such a list), whose items are
one sample each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Placeholder:
    """Stands for a tensor in a batch that was taken apart.

    Args:
        dtype: element type of the tensor.
        dims: its number of dimensions; the sizes may differ from batch to batch.
    """

    dtype: torch.dtype
    dims: int


def is_namedtuple(value: Any) -> bool:
    """Whether a tuple is built from separate arguments rather than from one iterable."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_column(value: Any) -> bool:
    """Whether a list or tuple holds plain values, one per sample."""
    if not isinstance(value, (list, tuple)) or is_namedtuple(value) or not value:
        return False
    return not any(isinstance(item, (torch.Tensor, Placeholder, Mapping, list, tuple)) for item in value)


def rebuilt(container: Any, items: Sequence[Any]) -> Any:
    """A container of the same type and keys with other items, in the order of `children`."""
    if isinstance(container, Mapping):
        return type(container)(dict(zip(container, items, strict=True)))
    return type(container)(*items) if is_namedtuple(container) else type(container)(items)


def children(container: Any) -> list[Any] | None:
    """The items of a mapping, list or tuple; None for a leaf."""
    if isinstance(container, Mapping):
        return [container[key] for key in container]
    if isinstance(container, (list, tuple)) and not is_column(container):
        return list(container)
    return None


def batch_length(batch: Any) -> int | None:
    """Number of samples in a batch, from its first leaf that has samples; None if there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    if is_column(batch):
        return len(batch)
    for item in children(batch) or ():
        length = batch_length(item)
        if length is not None:
            return length
    return None


def over_leaves(function: Callable[..., Any], batch: Any, *others: Any) -> Any:
    """Apply `function` to the corresponding leaves of equally built batches."""
    items = children(batch)
    if items is None:
        return function(batch, *others)
    columns = zip(items, *(children(other) for other in others), strict=True)
    return rebuilt(batch, [over_leaves(function, *leaves) for leaves in columns])


def take(batch: Any, start: int, stop: int) -> Any:
    """The samples from `start` to `stop`; leaves that hold no samples stay whole."""
    return over_leaves(lambda leaf: leaf[start:stop] if _has_samples(leaf) else leaf, batch)


def join(batches: Sequence[Any]) -> Any:
    """Put batches one after the other; a leaf that holds no samples is taken from the first.

    Raises:
        ValueError: the batches are not built alike.
    """
    if len(batches) == 1:
        return batches[0]
    try:
        return over_leaves(_join_leaves, *batches)
    except (TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            "Batches cannot be joined for dispatching, because they differ in structure or in the shape of a sample "
            f"({error}). Let the collate_fn pad them to one shape, or use split_batches=True or dispatch_batches=False."
        ) from error


def padded(batch: Any, length: int, head: Any, size: int) -> Any:
    """Lengthen a batch of `length` samples to `size` with the samples of `head`, over and over."""
    missing = size - length
    available = batch_length(head)
    fill = [head] * (missing // available)
    if missing % available:
        fill.append(take(head, 0, missing % available))
    return join([batch, *fill])


def _has_samples(leaf: Any) -> bool:
    return leaf.dim() > 0 if isinstance(leaf, torch.Tensor) else is_column(leaf)


def _join_leaves(*leaves: Any) -> Any:
    first = leaves[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(leaves) if first.dim() else first
    if is_column(first):
        return type(first)(item for leaf in leaves for item in leaf)
    return first
