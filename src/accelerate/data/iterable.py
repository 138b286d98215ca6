"""Streams: a process's part of data that has no indices, streams that are divided already, and parts that end together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from accelerate.base._warn import warn_user
from accelerate.data import contents
from accelerate.data.samplers import MOST_KEPT, Part, split_head

logger = logging.getLogger(__name__)

# Looked up, because torch has announced to remove its datapipes.
_DATAPIPE: Any = getattr(torch.utils.data, "IterDataPipe", ())


class IterableDatasetShard(Part, IterableDataset):
    """Gives one process its part of an iterable dataset.

    Every process reads the complete stream and yields only its samples. The samples of a round are those
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
        super().__init__(batch_size, drop_last, num_processes, process_index, split_batches)
        self.dataset = dataset
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes next, so that all processes shuffle it in the same way."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        # TypeError for a stream without length, which is what len() callers expect.
        rounds = self._rounds()
        full_rounds, rest = divmod(len(self.dataset), rounds.total)
        return (full_rounds + (rest > 0 and not self.drop_last)) * rounds.size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            # Every process reads the stream separately: only an equal seed makes it the same stream.
            generator.manual_seed(self.epoch)
        self.round_log.clear()
        head, samples = split_head(self.dataset, self._rounds().total, 0)
        self.order_head = head[:MOST_KEPT]
        yield from chain.from_iterable(self._shares(samples, head))


class CollateWrapper:
    """Calls the user's `collate_fn` and adds a number that the loader needs."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn


class CountingCollate(CollateWrapper):
    """Pairs each batch with the real samples in each shard's batch of its round; None if all are real."""

    def __init__(self, collate_fn: Callable[[Any], Any], shard: IterableDatasetShard) -> None:
        super().__init__(collate_fn)
        self.shard = shard

    def __call__(self, samples: Any) -> tuple[Any, tuple[int, ...] | None]:
        # The shard notes a round before it yields its samples, and a worker reads no sample before its batch's turn; so
        # if anything is noted, it is this batch's round.
        return self.collate_fn(samples), next(iter(self.shard.round_log.values()), None)


def uncounted(batches: Iterator[Any], start: int, log: dict[int, tuple[int, ...]]) -> Iterator[Any]:
    """Take the counts of real samples off the batches that workers have sent, and note them in this process."""
    log.clear()
    for number, (batch, real) in enumerate(batches, start):
        if real is not None:
            log[number] = tuple(real)
        yield batch


# Questions to a stream -------------------------------------------------------------------------------------------------


def is_datapipe(dataset: Any) -> bool:
    """Whether a dataset is one of torch's iterable datapipes, which torch's loader treats in its own way."""
    return isinstance(dataset, _DATAPIPE)


def is_split_by_node(dataset: Any, num_shards: int) -> bool:
    """Return whether a stream, or one inside it, is divided among this many processes; ValueError if among others."""
    if num_shards == 1:
        return False
    parts = list(contents.reachable(dataset))
    divided = [part for part in parts if _is_divided(part, num_shards)]
    if divided:
        divided_sources = {id(getattr(part, "_ex_iterable", None)) for part in divided}
        if any(id(part._ex_iterable) not in divided_sources for part in parts if hasattr(part, "_ex_iterable")):
            warn_user(
                f"{type(dataset).__name__} holds streams that are divided among the processes, and streams that are not. All are read as they "
                "are, so each process reads the undivided streams completely. Call split_dataset_by_node for all of them, or for none."
            )
    return bool(divided)


def _is_divided(stream: Any, num_shards: int) -> bool:
    config = getattr(stream, "_distributed", None)
    world = getattr(config, "world_size", 1)
    if world not in (1, num_shards):
        raise ValueError(
            f"dataset was divided among {world} nodes by split_dataset_by_node, but there are {num_shards} data shards: "
            "their parts would overlap or be missing. Call split_dataset_by_node(dataset, rank=..., "
            f"world_size={num_shards}), do not split it at all, or use shard_iterable_dataset=False to read it as it is."
        )
    if config is not None:
        return world == num_shards
    if is_datapipe(stream):
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return ranks == num_shards and _filters_shards(stream)
    return _splits_in_pipeline(stream)


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


def can_shard_itself(dataset: Any, num_shards: int) -> bool:
    """Whether a stream is stored in enough pieces to give each process its own pieces."""
    count = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return callable(getattr(dataset, "shard", None)) and isinstance(count, int) and count >= num_shards


def has_buffer(dataset: Any) -> bool:
    """Whether a stream of the library `datasets` shuffles in a buffer, which its state omits: samples would be lost."""
    stages = [getattr(dataset, "_ex_iterable", None)]  # of a pipeline; the list grows while it is walked
    for stage in stages:
        below = (getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ()))
        stages += [inner for inner in below if inner]
    return any("BufferShuffled" in type(stage).__name__ for stage in stages)


def restores(loader: DataLoader) -> bool:
    """Whether a loader reads a stream, in this process, that can save and restore its position without help."""
    dataset = loader.dataset
    stateful = callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))
    return stateful and isinstance(dataset, IterableDataset) and not (loader.num_workers or has_buffer(dataset))
