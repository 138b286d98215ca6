"""Iterable datasets: a process's part of a stream that has no indices, and streams that are divided already."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from accelerate.data.plan import RoundLog, pieces_of

# Looked up, because torch has announced to remove its datapipes.
_DATAPIPE: Any = getattr(torch.utils.data, "IterDataPipe", ())


class IterableDatasetShard(IterableDataset):
    """Gives one process its part of an iterable dataset.

    Every process reads the whole stream and yields the samples of its own batches. The samples of a round are those
    that `num_processes` batches hold together; a last, incomplete round is completed with the first samples of the
    stream, or dropped.

    Args:
        dataset: the stream.
        batch_size: batch size of a process, or of all processes together with `split_batches`.
        drop_last: drop the last round when it is not complete.
        num_processes: number of parts.
        process_index: which part to yield, from 0.
        split_batches: `batch_size` counts the samples of all processes.

    Raises:
        ValueError: `split_batches` with a batch size that the processes cannot share equally.

    Example:
        >>> list(IterableDatasetShard(range(10), batch_size=3, num_processes=2, process_index=1))
        [3, 4, 5, 9, 0, 1]
    """

    __module__ = "accelerate.data_loader"

    def __init__(
        self,
        dataset: IterableDataset,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size % num_processes:
            raise ValueError(
                f"split_batches=True cuts every batch into num_processes={num_processes} equal parts, which a batch "
                f"size of {batch_size} does not allow. Use a batch_size that is a multiple of {num_processes}, or "
                "split_batches=False."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self.round_log = RoundLog()

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes next, so that all processes shuffle it alike."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def _round_size(self) -> int:
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def __len__(self) -> int:
        # TypeError for a stream without length, which is what len() callers expect.
        rounds, rest = divmod(len(self.dataset), self._round_size())
        if rest and not self.drop_last:
            rounds += 1
        return rounds * (self._round_size() // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            # Every process reads the stream by itself: only an equal seed makes it the same stream.
            generator.manual_seed(self.epoch)
        self.round_log.clear()
        size = self._round_size()
        share = size // self.num_processes
        mine = slice(share * self.process_index, share * (self.process_index + 1))
        stream = iter(self.dataset)
        head: list[Any] = []
        number = 0
        while samples := list(islice(stream, size)):
            head = head or samples
            if len(samples) < size:
                if self.drop_last:
                    return
                self.round_log.note(number, len(samples), share, self.num_processes)
                samples = list(islice(chain(samples, cycle(head)), size))
            yield from samples[mine]
            number += 1


class Counted(NamedTuple):
    """A batch on its way from a worker process.

    Args:
        batch: the batch.
        real: number of real samples in each shard's batch of its round; None if all samples are real.
    """

    batch: Any
    real: tuple[int, ...] | None


class CountingCollate:
    """Sends the count of real samples along with each batch, from a worker process that shards a stream.

    Args:
        collate_fn: the loader's own.
        shard: the dataset of the loader.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], shard: IterableDatasetShard) -> None:
        self.collate_fn = collate_fn
        self.shard = shard

    def __call__(self, samples: Any) -> Counted:
        # The shard notes a round before it yields its samples, and a worker reads no sample before its batch's turn; so
        # if anything is noted, it is this batch's round.
        return Counted(self.collate_fn(samples), next(iter(self.shard.round_log.padded.values()), None))


def uncounted(batches: Iterator[Counted], start: int, log: RoundLog) -> Iterator[Any]:
    """Take the counts off the batches that worker processes have sent, and note them in this process.

    Args:
        batches: the batches as they arrive.
        start: number of the first.
        log: where to note them.
    """
    log.clear()
    for number, (batch, real) in enumerate(batches, start):
        if real is not None:
            log.padded[number] = tuple(real)
        yield batch


class PlainStream(IterableDataset):
    """Hides a torch datapipe, whose loader would else exchange seeds between processes whenever it is iterated.

    Args:
        dataset: the datapipe.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)


def is_split_by_node(dataset: Any, num_shards: int) -> bool:
    """Whether a stream was already divided among this many processes; dividing it again would lose most of it.

    Recognised are streams of Hugging Face `datasets` after `datasets.distributed.split_dataset_by_node`, WebDataset
    pipelines with its `split_by_node`, and torch datapipes with a `sharding_filter`, which torch's own loader applies.
    """
    if num_shards == 1:
        return False
    config = getattr(dataset, "_distributed", None)
    if config is not None:
        return getattr(config, "world_size", None) == num_shards
    if is_datapipe(dataset):
        return _torch_world_size() == num_shards and _filters_shards(dataset)
    return _splits_in_pipeline(dataset)


def check_split(dataset: Any, num_shards: int, shard_index: int) -> None:
    """Refuse a `datasets` stream that was divided among another number of processes.

    Raises:
        ValueError: part of the data would not be read by anybody.
    """
    config = getattr(dataset, "_distributed", None)
    world, rank = getattr(config, "world_size", 1), getattr(config, "rank", shard_index)
    if num_shards == 1 or world == 1:
        return
    if world != num_shards:
        raise ValueError(
            f"dataset was divided among {world} nodes by split_dataset_by_node, but there are {num_shards} data shards: "
            "their parts would overlap or be missing. Call split_dataset_by_node(dataset, rank=..., "
            f"world_size={num_shards}), do not split it at all, or use shard_iterable_dataset=False to read it as it is."
        )
    if rank != shard_index:
        warnings.warn(
            f"dataset is the part of rank {rank} by split_dataset_by_node, but this process reads shard {shard_index}. "
            "If ranks have passed the same rank, they read the same part; pass rank=accelerator.process_index.",
            stacklevel=4,
        )


def can_shard_itself(dataset: Any, num_shards: int) -> bool:
    """Whether a stream is stored in enough pieces to give each process pieces of its own."""
    count = piece_count(dataset)
    return callable(getattr(dataset, "shard", None)) and count is not None and count >= num_shards


def pieces(dataset: Any, num_shards: int) -> list[tuple[int, ...] | None]:
    """For each shard, which pieces of a stream it reads, as `datasets` divides them; None for other kinds of stream."""
    count = piece_count(dataset)
    if count is None or not _is_of_datasets(dataset):
        return [None] * num_shards
    return list(pieces_of(count, num_shards))


def share_of_pieces(dataset: Any, shard: int, num_shards: int) -> float | None:
    """Part of a stream, from 0.0 to 1.0, that a shard holds when it is divided by pieces; None if it cannot be told."""
    count, own = piece_count(dataset), pieces(dataset, num_shards)[shard]
    if count and own is not None:
        return len(own) / count
    return 1 / num_shards if count and count % num_shards == 0 else None


def share_of_split(dataset: Any, shard: int, num_shards: int) -> float | None:
    """Part of a stream, from 0.0 to 1.0, that a process reads when it was split already; None if it cannot be told."""
    config = getattr(dataset, "_distributed", None)
    count = getattr(getattr(dataset, "_ex_iterable", None), "num_shards", None)
    if config is None or not isinstance(count, int) or count < 1:
        return None
    strategy = getattr(config, "strategy", "auto")
    if strategy == "shards" or (strategy == "auto" and count % num_shards == 0):
        return len(range(shard, count, num_shards)) / count
    return 1.0  # each process goes through all samples and keeps every so manieth


def differs_between_ranks(dataset: Any, gather: Callable[[Any], list[Any]]) -> bool:
    """Whether the processes shuffle a `datasets` stream with different generators, because it was given no seed.

    Args:
        dataset: the stream.
        gather: returns the values that all processes have passed. Called on all of them alike, or on none.
    """
    if not _is_of_datasets(dataset):
        return False
    states = [repr(generator.bit_generator.state) for generator in _generators(dataset)]
    return bool(states) and len(set(map(tuple, gather(states)))) > 1


def _generators(dataset: Any) -> Iterator[Any]:
    part = getattr(dataset, "_ex_iterable", None)
    parts = [getattr(dataset, "_shuffling", None)]
    while part is not None and len(parts) < 100:
        parts.append(part)
        part = getattr(part, "ex_iterable", None)
    for part in parts:
        generator = getattr(part, "generator", None)
        if hasattr(generator, "bit_generator"):
            yield generator


def _is_of_datasets(dataset: Any) -> bool:
    return type(dataset).__module__.partition(".")[0] == "datasets"


def is_datapipe(dataset: Any) -> bool:
    """Whether a dataset is one of torch's iterable datapipes, which torch's loader treats in a way of its own."""
    return isinstance(dataset, _DATAPIPE)


def piece_count(dataset: Any) -> int | None:
    """In how many pieces a stream is stored, if it tells."""
    count = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return count if isinstance(count, int) else None


def _torch_world_size() -> int:
    """Number of processes as torch's own loader counts them when it divides a datapipe."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _filters_shards(datapipe: Any) -> bool:
    from torch.utils.data.graph import traverse_dps
    from torch.utils.data.graph_settings import get_all_graph_pipes

    return any(callable(getattr(pipe, "apply_sharding", None)) for pipe in get_all_graph_pipes(traverse_dps(datapipe)))


def _splits_in_pipeline(dataset: Any) -> bool:
    """Whether a pipeline in the manner of WebDataset has a stage that keeps the shards of this process."""
    stages = getattr(dataset, "pipeline", None)
    if not isinstance(stages, (list, tuple)):
        return False
    return any(getattr(stage, "__name__", None) == "split_by_node" or _splits_in_pipeline(stage) for stage in stages)
