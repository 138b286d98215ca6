"""Loaders on XLA devices, where torch_xla reads ahead and moves the batches in the background."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from accelerate.data.loader import DataLoaderShard
from accelerate.data.progress import Position


@lru_cache(maxsize=1)
def loader_class() -> type[DataLoaderShard]:
    """Build the class of loaders on XLA devices, which passes as torch_xla's own; called only where torch_xla is installed."""
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    class MpDeviceLoaderWrapper(DataLoaderShard, MpDeviceLoader):
        """A loader whose raw batches torch_xla reads in a thread; this loop hands them out."""

        __module__ = "accelerate.data_loader"
        _reads_ahead = _notes_nothing = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._parallel_loader_kwargs: dict[str, Any] = {}  # libraries fill it, as that of torch_xla's loader

        def _iterate(self, position: Position | None) -> Iterator[Any]:
            def in_background(batches: Iterator[Any]) -> Iterator[Any]:
                return iter(MpDeviceLoader(batches, self.device, **self._parallel_loader_kwargs))

            return self._run(position, None, in_background)

    return MpDeviceLoaderWrapper
