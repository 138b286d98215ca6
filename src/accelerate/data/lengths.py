"""Questions about a torch loader: its samplers, its batch size over all shards, its number of samples."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accelerate.data import shards
from accelerate.data.iterable import CountingCollate, IterableDatasetShard
from accelerate.data.plan import RoundLog
from accelerate.data.shards import BatchSamplerShard, SamplerShard, SkipBatchSampler


def batching_sampler(loader: DataLoader) -> Any | None:
    """The sampler that the loader iterates over: of batches, or of single indices when the loader does not batch."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def innermost(sampler: Any) -> Any:
    """The batch sampler (or sampler) below the shards and skips of this package."""
    while isinstance(sampler, (BatchSamplerShard, SkipBatchSampler, SamplerShard)):
        sampler = sampler.batch_sampler
    return sampler


def get_sampler(dataloader: DataLoader) -> Any | None:
    """Find the sampler that decides the order of the samples.

    Args:
        dataloader: a loader, prepared or not.

    Returns:
        The sampler of single indices below all wrapping, or None if a custom batch sampler hides it.

    Example:
        >>> type(get_sampler(DataLoader(range(8), batch_size=2, shuffle=True))).__name__
        'RandomSampler'
    """
    outer = batching_sampler(dataloader)
    inner = innermost(outer)
    if hasattr(inner, "batch_size") or inner is not dataloader.sampler:
        return getattr(inner, "sampler", None)
    return inner


def set_sampler(dataloader: DataLoader, sampler: Any) -> None:
    """Replace the sampler that decides the order of the samples.

    Args:
        dataloader: a loader, prepared or not.
        sampler: the new sampler of single indices.

    Raises:
        ValueError: the loader has a custom batch sampler without a `sampler` attribute.
    """
    inner = innermost(batching_sampler(dataloader))
    if hasattr(inner, "sampler"):
        inner.sampler = sampler
        if vars(dataloader).get("sampler") is not None:
            vars(dataloader)["sampler"] = sampler
    elif dataloader.batch_sampler is None:
        # Assigning to a torch loader is refused, because its iterator would not notice; before iteration it is safe.
        vars(dataloader)["sampler"] = sampler
    else:
        raise ValueError(
            f"The batch sampler of this dataloader ({type(inner).__name__}) has no `sampler` that could be replaced. "
            "Build the batch sampler anew and pass it as batch_sampler."
        )


def round_log(loader: DataLoader) -> RoundLog | None:
    """The log that tells which of this loader's batches hold duplicates; None if nothing is sharded here."""
    if isinstance(loader.dataset, IterableDatasetShard):
        return loader.dataset.round_log
    sampler = batching_sampler(loader)
    while isinstance(sampler, SkipBatchSampler):
        sampler = sampler.batch_sampler
    return sampler.round_log if isinstance(sampler, (BatchSamplerShard, SamplerShard)) else None


def global_batch_size(loader: DataLoader) -> int | None:
    """Number of samples in a round over all shards, or None where batches have no fixed size."""
    shard = loader.dataset
    if not isinstance(shard, IterableDatasetShard):
        shard = batching_sampler(loader)
        while isinstance(shard, SkipBatchSampler):
            shard = shard.batch_sampler
        if isinstance(shard, SamplerShard):
            shard = shard.batch_sampler
    if isinstance(shard, (BatchSamplerShard, IterableDatasetShard)):
        if shard.batch_size is None:
            return None
        return shard.batch_size if shard.split_batches else shard.batch_size * shard.num_processes
    size = getattr(shard, "batch_size", None)
    return loader.batch_size if size is None else size


def batches_per_step(loader: DataLoader) -> int:
    """Number of batches of the sampler below all sharding that a step takes over all shards."""
    shard = batching_sampler(loader)
    while isinstance(shard, SkipBatchSampler):
        shard = shard.batch_sampler
    return shard.num_processes if isinstance(shard, BatchSamplerShard) and not shard.split_batches else 1


def dataset_length(dataset: Any) -> int:
    """Number of samples in a dataset, before it is divided among processes.

    Raises:
        TypeError: the dataset has no length.
    """
    whole = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
    try:
        return len(whole)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(
            f"The length of this dataloader is not known, because its dataset ({whole.__class__.__name__}) has no "
            "__len__. Count steps instead of epochs, or give the dataset a __len__."
        ) from error


def is_stream(loader: DataLoader) -> bool:
    """Whether the loader reads an iterable dataset, which has no indices."""
    return isinstance(loader.dataset, IterableDataset)


def is_sharded_in_workers(loader: DataLoader) -> bool:
    """Whether the rounds are formed inside worker processes that do not tell this process about them."""
    in_workers = isinstance(loader.dataset, IterableDatasetShard) and loader.num_workers > 0
    return in_workers and not isinstance(loader.collate_fn, CountingCollate)


def samples_per_epoch(loader: DataLoader) -> int | None:
    """Number of samples that one epoch draws over all shards, or None if it cannot be told beforehand.

    The sampler knows better than the dataset: it may draw only some samples, or some of them repeatedly.
    """
    sampler = None if is_stream(loader) else get_sampler(loader)
    try:
        return dataset_length(loader.dataset) if sampler is None else len(sampler)
    except (TypeError, NotImplementedError):
        return None


def tell_epoch(loader: DataLoader, epoch: int) -> None:
    """Pass the epoch on to every part of a loader that wants to know it: batch samplers, sampler and dataset."""
    part = batching_sampler(loader)
    while part is not None:
        # Asked of the class, because wrappers hand on the attributes of what they wrap; only the owner shall hear.
        if hasattr(type(part), "set_epoch"):
            part.set_epoch(epoch)
        part = part.batch_sampler if hasattr(part, "batch_sampler") else getattr(part, "sampler", None)
    if callable(getattr(loader.dataset, "set_epoch", None)):
        loader.dataset.set_epoch(epoch)


def skips_samples(loader: DataLoader) -> bool:
    """Whether an epoch of the loader can begin at any sample; otherwise it begins at whole batches."""
    return not is_stream(loader) and shards.skips_samples(batching_sampler(loader))


def skipped_batches(loader: DataLoader) -> int:
    """Number of batches that the loader's own samplers leave out."""
    count, sampler = 0, batching_sampler(loader)
    while isinstance(sampler, SkipBatchSampler):
        count, sampler = count + sampler.skip_batches, sampler.batch_sampler
    return count
