"""Knowing which batch is the last one without reading the next: a look ahead in the indices, not in the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader

from accelerate.data import lengths
from accelerate.data.adapter import is_stateful, variant
from accelerate.data.shards import look_ahead

_ITERATION = ("__iter__", "_get_iterator")


class EndAhead:
    """A sampler that knows, when it has given an item, whether that was the last one of the iteration.

    Args:
        sampler: iterable of batches, or of single indices.

    Attributes:
        last: number of the last item, from 0, as soon as that item has been given; None before.

    Example:
        >>> sampler = EndAhead([[0, 1], [2]])
        >>> [(batch, sampler.last) for batch in sampler]
        [([0, 1], None), ([2], 1)]
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.last: int | None = None
        self._pairs: Iterator[tuple[int, tuple[Any, bool]]] = iter(())
        self._first: list[tuple[int, tuple[Any, bool]]] = []

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self.last = None
        self._pairs, self._first = enumerate(look_ahead(self.sampler)), []
        return self._items()

    def _items(self) -> Iterator[Any]:
        for number, (item, is_last) in chain(self._first, self._pairs):
            if is_last:
                self.last = number
            yield item

    def draw(self) -> None:
        """Let the sampler draw its order now, rather than when the running iteration is asked for its first item."""
        self._first = list(islice(self._pairs, 1))


def knows_end(loader: DataLoader) -> bool:
    """Whether the end of an epoch can be told from the indices: a map-style dataset that is read in this process.

    Worker processes read ahead anyway. A loader with an iteration of its own may yield anything.
    """
    own_iteration = any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in _ITERATION)
    return not (loader.num_workers or own_iteration or is_stateful(loader) or lengths.is_stream(loader))


def with_end(loader: DataLoader) -> tuple[DataLoader, EndAhead]:
    """A copy of a loader for one iteration, and what tells the end of it; see `knows_end`."""
    ahead = EndAhead(lengths.batching_sampler(loader))
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return variant(loader, **{name: ahead}), ahead
