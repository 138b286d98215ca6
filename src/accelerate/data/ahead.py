"""Knowing which batch is the last one without reading the next: a look ahead in the indices, not in the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from accelerate.data import lengths
from accelerate.data.adapter import is_stateful, variant

_ITERATION = ("__iter__", "_get_iterator")


class EndAhead:
    """A sampler that knows, when it has given an item, whether that was the last one of the iteration.

    One iteration at a time: the sampler is its own iterator.

    Args:
        sampler: iterable of batches, or of single indices.

    Attributes:
        ended: whether the last item has been given.

    Example:
        >>> sampler = EndAhead([[0, 1], [2]])
        >>> [(batch, sampler.ended) for batch in sampler]
        [([0, 1], False), ([2], True)]
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.ended = False
        self._items: Iterator[Any] = iter(())
        self._ahead: Any = _NOT_DRAWN

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> EndAhead:
        self.ended, self._ahead = False, _NOT_DRAWN
        return self

    def draw(self) -> None:
        """Let the sampler draw its order now, rather than when the running iteration is asked for its first item."""
        if self._ahead is _NOT_DRAWN:
            # Not before: torch draws a seed of its own between opening a loader and asking for the first item.
            self._items = iter(self.sampler)
            self._ahead = next(self._items, _END)

    def __next__(self) -> Any:
        item = self._ahead
        if item is _NOT_DRAWN:
            self.draw()
            item = self._ahead
        if item is _END:
            self.ended = True
            raise StopIteration
        self._ahead = following = next(self._items, _END)
        if following is _END:
            self.ended = True
        return item


_NOT_DRAWN, _END = object(), object()


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
