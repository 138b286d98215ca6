"""Iterable datasets: a process's part of a stream that has no indices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from accelerate.data.plan import RoundLog


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


def is_split_by_node(dataset: Any, num_shards: int) -> bool:
    """Whether a Hugging Face `datasets` stream was already divided among this many processes.

    `datasets.distributed.split_dataset_by_node` records what it did; dividing such a stream again would leave each
    process 1/num_shards of its own part, and nobody would read the rest.
    """
    config = getattr(dataset, "_distributed", None)
    return num_shards > 1 and getattr(config, "world_size", None) == num_shards


def can_shard_itself(dataset: Any, num_shards: int) -> bool:
    """Whether a stream is stored in enough pieces to give each process pieces of its own."""
    count = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return callable(getattr(dataset, "shard", None)) and isinstance(count, int) and count >= num_shards
