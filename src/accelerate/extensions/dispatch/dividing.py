"""Batches as rows of samples: how many samples a batch has, and how consecutive batches are divided among ranks.

A batch is a nested structure. Its leaves with samples are tensors and NumPy arrays, which have one row per sample, and
lists, which have one item per sample. All other leaves are the same for all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from accelerate.base.nested import honor_type, is_namedtuple, like_mapping


def is_column(value: Any) -> bool:
    """Whether a list or tuple holds plain values, one per sample."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields") or not value:
        return False
    return not any(isinstance(item, (torch.Tensor, Mapping, list, tuple)) for item in value)


def lengths(batch: Any, is_unit: Callable[[Any], bool], path: str = "batch") -> Iterator[tuple[str, int]]:
    """Yield the key path and the number of rows or items of each leaf that can have samples, and of each unit."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        if batch.ndim:
            yield path, batch.size(0) if isinstance(batch, torch.Tensor) else len(batch)
    elif is_column(batch) or is_unit(batch):
        yield path, len(batch)
    else:
        for key, item in _items(batch):
            yield from lengths(item, is_unit, path + _written(batch, key))


def agreed_length(batch: Any) -> int | None:
    """Return the number of samples that all leaves of a batch agree on; None if they differ or if there are none."""
    counts = {length for _, length in lengths(batch, _is_list_of_dicts)}
    return counts.pop() if len(counts) == 1 else None


def first_length(batch: Any) -> int:
    """Return the number of samples in the first leaf that has any; ValueError if there is none."""
    length = next((length for _, length in lengths(batch, _is_never_unit)), None)
    if length is None:
        raise ValueError(
            f"slice_fn_for_dispatch cannot divide a {type(batch).__name__} without a tensor, array or list: it has no samples. Let "
            "the collate_fn return one, or use dispatch_batches=False."
        )
    return length


def shares(samples: int, shards: int) -> list[tuple[int, int]]:
    """Return start and end of each shard's part of consecutive samples; the parts differ by one sample at most."""
    size, longer = divmod(samples, shards)
    return list(pairwise(shard * size + min(shard, longer) for shard in range(shards + 1)))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not is_namedtuple(value)


def _is_list_of_dicts(value: Any) -> bool:
    return _is_list(value) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _is_never_unit(value: Any) -> bool:
    return False


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def _written(container: Any, key: Any) -> str:
    return f".{container._fields[key]}" if is_namedtuple(container) else f"[{key!r}]"


def _has_list_of(length: int, batch: Any) -> bool:
    """Whether a batch contains a list of so many tensors, lists or dicts, which can be samples."""
    if _is_list(batch) and not is_column(batch) and len(batch) == length:
        return True
    return any(_has_list_of(length, item) for _, item in _items(batch))


class Divider:
    """Divides batches among ranks as if they were one batch. Each value must belong to one sample, or to all of them.

    Args:
        lists_are_samples: whether a list with one item per sample can hold samples; False if `default_collate` made the
            batches, which makes no such lists.
        remedy: what the user can do about batches that cannot be divided.
        checked: whether leaves must have one row per sample; False if the user's own function divides.
    """

    def __init__(self, lists_are_samples: bool, remedy: str, checked: bool = True) -> None:
        self.lists_are_samples, self.remedy, self.checked = lists_are_samples, remedy, checked
        self.witness: tuple[Any, int] | None = None  # a batch of the same kind, and its size

    def size(self, batch: Any, samples: int | None) -> int:
        """Return the size of a batch that is to be divided, of so many samples if known; ValueError if it is uncertain."""
        if samples is not None:
            counts = {length for _, length in lengths(batch, lambda value: _is_list(value) and len(value) == samples)}
            size = counts.pop() if len(counts) == 1 else samples
            # A collate_fn may skip samples that it cannot read. One row for several samples is a pack of them.
            return size if 1 < size < samples and not _has_list_of(size, batch) else samples
        by_path = dict(lengths(batch, _is_list_of_dicts if self.lists_are_samples else _is_never_unit))
        if not by_path:
            raise self.refusal(f"a {type(batch).__name__} without a tensor, array or list has no samples to divide")
        if len(set(by_path.values())) > 1:
            paths = {length: path for path, length in reversed(by_path.items())}
            named = ", ".join(f"{path} has {length}" for length, path in reversed(paths.items()))
            raise self.refusal(f"its number of samples is uncertain, because its values differ in length ({named})")
        return next(iter(by_path.values()))

    def refusal(self, reason: str) -> ValueError:
        """Return the error for batches that cannot be divided."""
        return ValueError(f"A dispatched batch cannot be divided among the ranks: {reason}. {self.remedy}")

    def divide(
        self, batches: Sequence[Any], sizes: Sequence[int], bounds: Sequence[tuple[int, int]], real: int | None = None
    ) -> list[Any]:
        """Return the part between each pair of bounds, which count samples over all batches.

        Only the first `real` batches must agree on values that belong to all samples; the others fill up.
        """
        if len(batches) == 1 and list(bounds) == [(0, sizes[0])]:
            return [batches[0]]
        real = len(batches) if real is None else real
        return _Division(self, sizes, bounds, real).parts((), "batch", batches)


class _Division:
    def __init__(self, divider: Divider, sizes: Sequence[int], bounds: Sequence[tuple[int, int]], real: int) -> None:
        self.divider, self.sizes, self.bounds, self.real = divider, sizes, bounds, real
        self.checked = divider.checked or real < len(sizes)

    def parts(self, keys: tuple[Any, ...], path: str, values: Sequence[Any]) -> list[Any]:
        """Divide the values that the batches have at one path."""
        first = values[0]
        if isinstance(first, torch.Tensor) and first.dim():
            return self._slices(path, values, torch.cat)
        if isinstance(first, np.ndarray) and first.ndim:
            return self._slices(path, values, np.concatenate)
        if isinstance(first, (list, tuple)) and (is_column(first) or self._holds_samples(keys, path, values)):
            return self._slices(path, values, lambda lists: honor_type(first, chain.from_iterable(lists)))
        if not isinstance(first, (Mapping, list, tuple)):
            return [self._shared(path, values)] * len(self.bounds)
        inner = [key for key, _ in _items(first)]
        if any({key for key, _ in _items(value)} != set(inner) for value in values):
            raise self._unequal(path, f"the first batch has the keys {inner}")
        columns = [
            self.parts((*keys, key), path + _written(first, key), [value[key] for value in values]) for key in inner
        ]
        by_rank = zip(*columns, strict=True) if columns else [()] * len(self.bounds)
        if isinstance(first, Mapping):
            return [like_mapping(first, dict(zip(inner, part, strict=True))) for part in by_rank]
        return [honor_type(first, part) for part in by_rank]

    def _slices(self, path: str, values: Sequence[Any], join: Callable[[Any], Any]) -> list[Any]:
        first = values[0]
        if isinstance(first, torch.Tensor) and (first.layout != torch.strided or first.is_nested):
            kind = "nested" if first.is_nested else "sparse"
            raise self.divider.refusal(f"{path} is a {kind} tensor, which has no rows to divide")
        if not all(isinstance(value, list | tuple) == isinstance(first, list | tuple) for value in values):
            raise self._unequal(path, f"the first batch has a {type(first).__name__}")
        try:
            for value, size in zip(values, self.sizes, strict=True):
                if self.checked and len(value) != size:
                    what = "items" if isinstance(value, (list, tuple)) else "rows"
                    raise self.divider.refusal(f"{path} has {len(value)} {what}, and the batch has {size} samples")
            joined = first if len(values) == 1 else join(values)
        except (RuntimeError, TypeError) as error:
            raise self._unequal(path, str(error)) from error
        if not self.checked:  # joined only
            return [joined]
        return [joined if (start, stop) == (0, len(joined)) else joined[start:stop] for start, stop in self.bounds]

    def _holds_samples(self, keys: tuple[Any, ...], path: str, values: Sequence[Any]) -> bool:
        """Whether lists have one item per sample; otherwise they belong to the structure."""
        first = values[0]
        if not self.divider.lists_are_samples or is_namedtuple(first) or (isinstance(first, tuple) and not keys):
            return False
        evidence = [*zip(values, self.sizes, strict=True), *self._witness(keys)]
        if any(not isinstance(value, (list, tuple)) or len(value) != size for value, size in evidence):
            return False
        items_have_rows = [
            length == size for value, size in evidence for item in value for _, length in lengths(item, _is_never_unit)
        ]
        sizes = {size for _, size in evidence}
        if not all(items_have_rows) or not items_have_rows or len(sizes) > 1:
            return True
        if sizes == {1} or not self.checked or _differ_in_kind(first):
            return False
        raise self.divider.refusal(
            f"{path} has {len(first)} items with {len(first)} rows each, so its items or their rows can be the samples"
        )

    def _witness(self, keys: tuple[Any, ...]) -> list[tuple[Any, int]]:
        if self.divider.witness is None:
            return []
        value, size = self.divider.witness
        try:
            for key in keys:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            return []
        return [(value, size)]

    def _shared(self, path: str, values: Sequence[Any]) -> Any:
        first = values[0]
        for value in values[1 : self.real]:
            if not (value is first or value == first):
                raise self._unequal(
                    path, f"{first!r} is the same for all samples of a batch, another batch has {value!r}"
                )
        return first

    def _unequal(self, path: str, reason: str) -> ValueError:
        return self.divider.refusal(f"{path} differs between batches ({reason})")


def _differ_in_kind(items: Sequence[Any]) -> bool:
    """Whether tensors differ in dtype or number of dimensions, as samples of one list do not."""
    kinds = {(item.dtype, item.ndim) if isinstance(item, (torch.Tensor, np.ndarray)) else type(item) for item in items}
    return len(kinds) > 1
