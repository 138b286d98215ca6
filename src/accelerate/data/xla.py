"""Loaders on XLA devices, where torch_xla's own loader moves the batches in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from accelerate.utils.random import synchronize_rng_states


class Note(NamedTuple):
    """What a prepared loader knew of a batch when it read it.

    Attributes:
        end: whether it is the last one of the epoch.
        remainder: `remainder` of the loader.
        counts: `batch_counts` of the loader.
        position: epoch, batches yielded and whether the epoch is at its end.
    """

    end: bool
    remainder: int
    counts: tuple[int, ...] | None
    position: tuple[int, int, bool]


class ReadAhead:
    """A prepared loader that notes, for each batch, what it knew when it read that batch.

    torch_xla reads it in a thread of its own, and hands the batches out later in the same order.

    Args:
        loader: a prepared loader.

    Attributes:
        notes: one for each batch that was read and not handed out yet.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.notes: deque[Note] = deque()

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        loader = self.loader
        for batch in loader:
            progress = loader._progress
            position = (progress.epoch, progress.batches, progress.at_end)
            self.notes.append(Note(loader.end_of_dataloader, loader.remainder, loader.batch_counts, position))
            yield batch


@lru_cache(maxsize=1)
def wrapper_class() -> type:
    """Build the class around torch_xla's `MpDeviceLoader`; called only where torch_xla is installed."""
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    class MpDeviceLoaderWrapper(MpDeviceLoader):
        """Moves batches of a prepared loader to an XLA device ahead of use, and otherwise passes as that loader.

        Args:
            dataloader: a prepared loader that leaves its batches on the CPU.
            device: the XLA device.
        """

        __module__ = "accelerate.data_loader"

        def __init__(self, dataloader: Any, device: torch.device) -> None:
            self._read_ahead = ReadAhead(dataloader)
            super().__init__(self._read_ahead, device)
            self.dataloader = dataloader
            self.device = device

        def __iter__(self) -> Any:
            # Background threads may read several batches ahead: the synchronisation that opens an epoch has to come
            # before them, in step with the other processes.
            prepared = self.dataloader
            gradient_state = prepared.gradient_state
            watch = gradient_state._step_watch
            if watch is not None:
                watch.before_loop(self)
            rng_types, prepared.rng_types = prepared.rng_types, None
            if rng_types is not None:
                synchronize_rng_states(rng_types, prepared.synchronized_generator)
            prepared.read_in_background = True
            gradient_state._add_dataloader(self)
            try:
                for batch in super().__iter__():
                    # What the loader says of itself is about the batch that was read last, several batches ahead.
                    note = self._read_ahead.notes.popleft()
                    self.end_of_dataloader, self.remainder, self.batch_counts = note.end, note.remainder, note.counts
                    prepared._progress.handed_out = note.position
                    gradient_state._activate(self)
                    yield batch
                    if watch is not None:
                        watch.before_batch(self, at_end=note.position[2])
            finally:
                gradient_state._remove_dataloader(self)
                prepared._progress.handed_out = None
                prepared.read_in_background = False
                prepared.rng_types = rng_types
                self._read_ahead.notes.clear()

        def __getattr__(self, name: str) -> Any:
            if name == "dataloader":
                raise AttributeError(name)
            return getattr(self.dataloader, name)

    return MpDeviceLoaderWrapper


def wrap(dataloader: Any, device: torch.device) -> Any:
    """Put torch_xla's background loader around a prepared loader."""
    return wrapper_class()(dataloader, device)


def is_wrapped(dataloader: Any) -> bool:
    """Whether `dataloader` came from `wrap`."""
    return wrapper_class.cache_info().currsize > 0 and isinstance(dataloader, wrapper_class())


def unwrapped(dataloader: Any) -> Any:
    """The prepared loader inside."""
    return dataloader.dataloader


def rewrap(dataloader: Any, inner: Any) -> Any:
    """Put another loader into a wrapper like `dataloader`."""
    return wrap(inner, dataloader.device)
