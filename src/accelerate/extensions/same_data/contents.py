"""Descriptions of a dataset that ranks can compare: tables of the library `datasets`, and the sequences that order samples."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

from accelerate.data.contents import reachable

# Digests ---------------------------------------------------------------------------------------------------------------

# How many items of an array or of a list of tensors decide its number.
_MOST_ITEMS = 64
# How many indices, samples or items decide a digest of an order.
MOST_DIGESTED = 1000
# Above these lengths, only the order of the first items of a list or an array of numbers is compared.
_MOST_NAMES, _MOST_RECORDS, _MOST_NUMBERS = 50_000, 10_000, 1_000_000
_MOST_BYTES = 1 << 24
# Where `datasets` keeps the indices of a shuffled or selected table, which has none if it is contiguous.
_INDICES = "_indices"
_SKETCH, _PROBES, _MOST_SEQUENCES = 32, 16, 4


def digest(values: Iterable[Any]) -> str | None:
    """Return a digest of the first thousand indices or samples, in their order; None if they cannot be told apart."""
    keys = [_key(value) for value in islice(values, MOST_DIGESTED)]
    known = [key for key in keys if key is not None]
    return _hashed(known) if known else None


def _hashed(value: Any) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"


def _key(value: Any, depth: int = 0) -> int | None:
    """Return a number for an index, a name or a record of these, equal on all ranks; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, str):
        # Each node may have its own copy of the files below another folder.
        return zlib.crc32(value[:512].rpartition("/")[2].encode(errors="replace"))
    if isinstance(value, bytes):
        return zlib.crc32(value[:512])
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim:
        values = value.reshape(-1)[:_MOST_ITEMS].tolist()
        return zlib.crc32(repr(values).encode()) if values and type(values[0]) is int else None
    if isinstance(value, (list, tuple, Mapping)):
        items = value.values() if isinstance(value, Mapping) else value
        keys = [key for key in (_key(item, depth + 1) for item in islice(items, 4)) if key is not None]
        return zlib.crc32(repr(keys).encode()) if keys and depth < 2 else None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError, ValueError):
        return None


class Arrangement(NamedTuple):
    """A sequence that may decide which sample has which index.

    Attributes:
        name: where it is.
        order: digest of its first items.
        items: sum over all items, which does not depend on their order; None if there are too many.
        sketch: smallest numbers of its items; sequences with many items in common share some. Empty if items repeat.
        decides: the sequence is known to decide the order; others may have another use.
    """

    name: str
    order: str
    items: int | None
    sketch: list[int]
    decides: bool


class Arrangements:
    """The sequences in a dataset that have an item for each sample, such as the indices of a subset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        # By the object that holds the sequence and the name of that: other sequences may be made again each time.
        self._sums: dict[tuple[int, str, int], tuple[int | None, list[int]]] = {}

    def describe(self) -> list[Arrangement]:
        """Describe the sequences in their present order."""
        if isinstance(self.dataset, (list, tuple)):
            found: Iterable[tuple[Any, str, Any, bool]] = [
                (self.dataset, f"the {type(self.dataset).__name__}", self.dataset, True)
            ]
        else:
            found = ((part, *each) for part in reachable(self.dataset) for each in _sequences(part))
        described = (self._described(*each) for each in found)
        return list(islice((each for each in described if each is not None), _MOST_SEQUENCES))

    def _described(self, holder: Any, name: str, values: Any, decides: bool) -> Arrangement | None:
        if len(values) < 2 or _key(values[0]) is None:
            return None
        numbers = isinstance(values, (torch.Tensor, np.ndarray, range)) or type(values[0]) is int
        order = digest(values[:MOST_DIGESTED].tolist() if hasattr(values, "tolist") else values)
        place = id(holder), name, len(values)
        if place not in self._sums:
            self._sums[place] = _sums_of_numbers(values) if numbers else _sums_of_keys(values)
        items, sketch = self._sums[place]
        # Of too many names it is not known whether their order differs, or each rank has other names for the same samples.
        decides = (decides or not numbers) and (numbers or items is not None)
        return Arrangement(name, order or "", items, sketch, decides)


def _sequences(part: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield name and values of the sequences of an object that have its length, and whether they decide the order."""
    kind = type(part).__name__
    if is_table(part):
        indices = getattr(part, _INDICES)
        if indices is not None:
            column = indices.column(0)
            yield f"the index table of a {kind}", column.slice(0, _MOST_NUMBERS + 1).to_numpy(), True
        return
    if not hasattr(type(part), "__getitem__"):
        return
    try:
        length = len(part)
    except Exception:  # of the user's code
        return
    for name, value in getattr(part, "__dict__", {}).items():
        if hasattr(value, "iloc"):  # pandas
            records = value.iloc[:_MOST_RECORDS]
            rows = records.itertuples() if hasattr(records, "itertuples") else records.items()
            yield from [(f"{kind}.{name}", list(rows), True)] if len(value) == length else []
            continue
        one_dimension = isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 1
        if (one_dimension or isinstance(value, (list, tuple, range))) and len(value) == length:
            yield f"{kind}.{name}", value, isinstance(part, Subset)


def _sums_of_keys(values: Any) -> tuple[int | None, list[int]]:
    if len(values) > (_MOST_NAMES if isinstance(values[0], (str, bytes)) else _MOST_RECORDS):
        return None, []
    keys = [key or 0 for key in map(_key, values)]
    distinct = set(keys)
    return sum(keys), sorted(distinct)[:_SKETCH] if len(distinct) == len(keys) else []


def _sums_of_numbers(values: Any) -> tuple[int | None, list[int]]:
    if len(values) > _MOST_NUMBERS:
        return None, []
    try:
        numbers = np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values).astype(np.uint64)
    except (TypeError, ValueError, OverflowError):
        return None, []
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)  # wraps around
    mixed ^= mixed >> np.uint64(29)
    mixed.sort()
    distinct = bool((mixed[1:] != mixed[:-1]).all())
    return int(mixed.sum()), mixed[:_SKETCH].tolist() if distinct else []


# The library `datasets` --------------------------------------------------------------------------------------------------


def is_table(value: Any) -> bool:
    """Whether this is a map-style dataset of the library `datasets`."""
    return type(value).__module__ == "datasets.arrow_dataset" and hasattr(value, _INDICES)


def tables(dataset: Any) -> list[Any]:
    """Return the map-style datasets of the library `datasets` in a dataset."""
    return [part for part in reachable(dataset) if is_table(part)]


def probe(table: Any) -> tuple[int, Arrangement | None]:
    """Return the length of a table, and a description of its rows as they are stored: of some, if it is large."""
    length = len(table)
    complete = length <= _MOST_RECORDS and table.data.nbytes <= _MOST_BYTES
    places = range(length) if complete else sorted({length * number // _PROBES for number in range(_PROBES)})
    try:
        rows = [zlib.crc32(repr(row).encode()) for row in table.with_format("arrow")[list(places)].to_pylist()]
    except Exception:  # a column type that cannot be read without its library
        return length, None
    distinct = sorted(set(rows))
    sketch = distinct[:_SKETCH] if complete and len(distinct) == len(rows) else []
    name = f"the table of a {type(table).__name__}"
    return length, Arrangement(name, digest(rows) or "", sum(rows) if complete else None, sketch, complete)


def shuffles(dataset: Any) -> str | None:
    """Return a digest of the states of the generators that shuffle streams of `datasets`; None if nothing shuffles."""
    streams = [getattr(part, "_ex_iterable", None) for part in reachable(dataset)]
    states = []
    for stage in streams:  # grows while it is walked
        if stage is None:
            continue
        generator = getattr(getattr(stage, "generator", None), "bit_generator", None)
        states += [] if generator is None else [repr(generator.state)]
        streams += [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())]
    return _hashed(states) if states else None
