"""Loaders on XLA devices, where torch_xla's own loader moves the batches in the background."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from accelerate.utils.random import synchronize_rng_states


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
            super().__init__(dataloader, device)
            self.dataloader = dataloader
            self.device = device

        def __iter__(self) -> Any:
            # Background threads may read several batches ahead: the synchronisation that opens an epoch has to come
            # before them, in step with the other processes.
            prepared = self.dataloader
            rng_types, prepared.rng_types = prepared.rng_types, None
            if rng_types is not None:
                synchronize_rng_states(rng_types, prepared.synchronized_generator)
            try:
                yield from super().__iter__()
            finally:
                prepared.rng_types = rng_types

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
