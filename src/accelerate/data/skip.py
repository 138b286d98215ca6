"""Leaving out the beginning of an epoch, to continue an interrupted one."""

from __future__ import annotations

import math

from torch.utils.data import DataLoader

from accelerate.data import lengths, xla
from accelerate.data.adapter import is_stateful, variant
from accelerate.data.loader import PreparedLoader, SkipDataLoader, skipping


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
    """Make a loader that leaves out the first batches of an epoch.

    With a map-style dataset the batches are left out by their indices and never loaded; a stream has to be read and
    dropped. Of a prepared loader the result is a view: the two count epochs together, so that after the shortened epoch
    the original goes on with the next one. Every process has to call it with the same number.

    Args:
        dataloader: a prepared loader, or a torch loader.
        num_batches: number of batches to leave out, as a process counts them.

    Returns:
        A loader over the remaining batches; the given one if there is nothing to leave out.

    Raises:
        TypeError: `dataloader` is not a torch loader.
        ValueError: `num_batches` is negative, or more than the loader has.

    Example:
        >>> loader = DataLoader(range(6), batch_size=2)
        >>> for epoch in (3, 4):  # epoch 3 was interrupted after two batches
        ...     batches = skip_first_batches(loader, 2) if epoch == 3 else loader
        ...     print(epoch, [batch.tolist() for batch in batches])
        3 [[4, 5]]
        4 [[0, 1], [2, 3], [4, 5]]
    """
    num_batches = math.ceil(num_batches or 0)
    if num_batches < 0:
        raise ValueError(f"num_batches is {num_batches}; pass the number of batches to leave out, 0 or more.")
    if xla.is_wrapped(dataloader):
        return xla.rewrap(dataloader, skip_first_batches(xla.unwrapped(dataloader), num_batches))
    if not isinstance(dataloader, DataLoader):
        raise TypeError(f"dataloader is a {type(dataloader).__name__}; pass a torch.utils.data.DataLoader.")
    if num_batches == 0:
        return dataloader
    length = _length(dataloader)
    if length is not None and num_batches > length:
        raise ValueError(
            f"num_batches is {num_batches}, but the loader has {length} batches in an epoch. Count the batches of the "
            "interrupted epoch alone: steps % len(dataloader)."
        )
    if isinstance(dataloader, PreparedLoader):
        return dataloader._skipping(num_batches)
    if lengths.is_stream(dataloader):
        base = variant(dataloader)
        return SkipDataLoader(
            dataloader.dataset, num_batches, use_stateful_dataloader=is_stateful(dataloader), _base=base
        )
    return skipping(dataloader, num_batches)


def _length(loader: DataLoader) -> int | None:
    """Batches of a loader as far as they are known: not those of streams, whose length is a promise at best."""
    if lengths.is_stream(loader):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
