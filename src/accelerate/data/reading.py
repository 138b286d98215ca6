"""The ways in which processes read the data of a loader: `build` chooses one, which then shards the loader and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch.utils.data import BatchSampler, ChainDataset, DataLoader

from accelerate.data import adapter, iterable
from accelerate.data.adapter import batching_sampler, is_stream, known_length
from accelerate.data.iterable import CountingCollate, IterableDatasetShard, SizingCollate
from accelerate.data.plan import DataPlan, ShardLayout, ShardPlan
from accelerate.data.samplers import BatchSamplerShard, Rounds, SamplerShard, has_tensor_order

# Samples, duplicates and batches of a shard, None if they are not known.
Counts = tuple[int | None, int | None, int | None]


class Reading:
    """A way of reading.

    Args:
        loader: the torch loader, not sharded yet.
        layouts: the shard of each process.
        process_index: this process.
        split_batches: the loader's batch size is that of all processes together.
        even_batches: the last round is completed.

    Attributes:
        name: what the plan calls it.
        ends_by_vote: shards may end at different steps.
        sees_all: this process knows the data of all shards.
    """

    name: ClassVar[str]
    ends_by_vote = False
    sees_all = True

    def __init__(
        self,
        loader: DataLoader,
        layouts: Sequence[ShardLayout],
        process_index: int,
        split_batches: bool,
        even_batches: bool,
    ) -> None:
        self.loader, self.layouts, self.process_index = loader, layouts, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.shards, self.shard_index = layouts[0].num_shards, layouts[process_index].shard_index
        self.batching = batching_sampler(loader)
        self.drop_last = bool(loader.drop_last or getattr(self.batching, "drop_last", False))

    def sharded(self) -> dict[str, Any]:
        """Return the attributes of the loader that change for this process, with their new values."""
        return self._smaller_batches()

    def counts(self) -> list[Counts]:
        """Return samples, duplicates and batches of each shard in an epoch."""
        return [(None, None, None)] * self.shards

    def read_share(self) -> list[float | None]:
        """Return the part of the data that the processes of each shard read, from 0.0 to 1.0; None if it is not known."""
        return [None] * self.shards

    def batch_size(self) -> int | None:
        """Return the batch size of the loader, before it is split."""
        size = getattr(self.batching, "batch_size", None)
        if self.loader.batch_sampler is not None:
            return self.loader.batch_size if size is None else size
        # Not batched: the sampler gives single indices, unless it is a batch sampler itself.
        return size if isinstance(self.batching, BatchSampler) else 1

    def samples(self) -> int | None:
        """Return the samples that the sampler draws in an epoch."""
        return adapter.samples_per_epoch(self.loader)

    def walked(self) -> bool:
        """Return whether each process goes through the batches of all."""
        return False

    def plan(self) -> DataPlan:
        """Return who reads what."""
        total, size = self.samples(), self.share()
        countable = total is not None and size is not None and self._batches_plainly()
        counts = self.counts() if countable else Reading.counts(self)
        ranks: list[list[int]] = [[] for _ in counts]
        for rank, layout in enumerate(self.layouts):
            ranks[layout.shard_index].append(rank)
        read = [1.0] if self.shards == 1 else self.read_share()
        shards = [ShardPlan(shard, tuple(ranks[shard]), *counts[shard], read[shard]) for shard in range(self.shards)]
        samples, duplicates, _ = (None if None in column else sum(column) for column in zip(*counts, strict=True))
        dataset = self.loader.dataset
        return DataPlan(
            kind="stream" if is_stream(self.loader) else "map-style",
            reading=self.name,
            process_index=self.process_index,
            shard_index=self.shard_index,
            shards=tuple(shards),
            parts=self.shards if isinstance(self, AlreadySplit) else 1,
            dataset_length=known_length(adapter.dataset_length, dataset) if self.sees_all else None,
            samples=samples,
            duplicates=duplicates,
            dropped=None if samples is None or total is None else total - samples,
            batch_size=size,
            total_batch_size=None if size is None else size * self.shards,
            workers=self.loader.num_workers,
            sampler=adapter.sampler_kind(self.loader),
            drop_last=self.drop_last,
            ends_by_vote=self.shards > 1 and self.ends_by_vote,
            walked=self.shards > 1 and self.walked(),
        )

    def share(self) -> int | None:
        """Return the batch size of a process."""
        size = self.batch_size()
        return size // self.shards if size is not None and self.split_batches else size

    def _batches_plainly(self) -> bool:
        """Whether torch's loader and batch sampler batch the order of the samples."""
        if not adapter.iterates_plainly(self.loader):
            return False
        if is_stream(self.loader):  # how several workers divide the stream is not known
            return self.loader.num_workers < 2
        unbatched = self.loader.batch_sampler is None and not isinstance(self.batching, BatchSampler)
        return unbatched or type(self.batching) is BatchSampler

    def _rounds(self, shards: int, fill: str) -> list[Counts]:
        """Count the samples of each shard when the shards take batches in turn.

        Args:
            shards: how many shards share the samples that the sampler draws.
            fill: the treatment of an incomplete last round that is not dropped: "batches" completes it to full batches, "round"
                only until all shards hold equally many, "nothing" leaves shards with a smaller batch, or none.
        """
        size = self.share()
        rounds, rest = divmod(adapter.samples_per_epoch(self.loader), size * shards)
        if self.drop_last or not rest:
            return [(rounds * size, 0, rounds)] * shards
        fill = "nothing" if shards == 1 else fill
        width = -(-rest // shards) if fill == "round" else size
        result: list[Counts] = []
        for real in Rounds(width, shards).real(rest):
            filled = width if fill != "nothing" else real
            result.append((rounds * size + real, filled - real, rounds + (filled > 0)))
        return result

    def _smaller_batches(self) -> dict[str, Any]:
        """Return the attributes that change if `split_batches` makes the batches of a process smaller."""
        if not (self.split_batches and self.shards > 1):
            return {}
        batching = self.loader.batch_sampler
        if type(batching) is not BatchSampler:
            raise ValueError(
                f"split_batches=True would cut the batches of a {type(batching).__name__}, which gives each process its own part "
                "already. Build its batches in the size of a process, and use split_batches=False."
            )
        size = batching.batch_size // self.shards
        changes = {"batch_sampler": BatchSampler(batching.sampler, size, batching.drop_last)}
        return changes if self.loader.batch_size is None else {**changes, "batch_size": size}


class OwnShard(Reading):
    """Each process reads the indices of its shard."""

    name = "own shard by index"

    def sharded(self) -> dict[str, Any]:
        """Shard the batch sampler, or the sampler of a loader that does not batch."""
        if self.shards == 1:
            return {}
        batches, shards, index = self.loader.batch_sampler is not None, self.shards, self.shard_index
        if not batches and not isinstance(self.batching, BatchSampler):
            return {"sampler": SamplerShard(self.batching, shards, index, self.even_batches)}
        shard = BatchSamplerShard(self.batching, shards, index, self.split_batches, self.even_batches)
        changes: dict[str, Any] = {"batch_sampler" if batches else "sampler": shard}
        if self.split_batches and self.loader.batch_size:
            changes["batch_size"] = self.loader.batch_size // shards
        return changes

    def counts(self) -> list[Counts]:
        """Count rounds, of which the last may be completed."""
        return self._rounds(self.shards, "batches" if self.even_batches else "nothing")

    def read_share(self) -> list[float | None]:
        """Return equal parts."""
        return [1 / self.shards] * self.shards

    def walked(self) -> bool:
        """Return whether the sampler is a custom one, whose order is not known beforehand."""
        batching = self.batching
        return not has_tensor_order(batching.sampler if type(batching) is BatchSampler else batching)


class ReadsEverything(Reading):
    """Each process reads the complete stream and keeps its part of each round."""

    name = "reads everything, keeps its part"

    def sharded(self) -> dict[str, Any]:
        """Wrap the stream."""
        if self.shards == 1:
            return {}
        loader, size = self.loader, self.loader.batch_size or 1
        part = IterableDatasetShard(
            loader.dataset, size, loader.drop_last, self.shards, self.shard_index, self.split_batches
        )
        changes = {**self._smaller_batches(), "dataset": part}
        if loader.num_workers and adapter.iterates_plainly(loader):
            changes["collate_fn"] = CountingCollate(loader.collate_fn, part)
        return changes

    def counts(self) -> list[Counts]:
        """Count rounds; that of a stream is always completed."""
        return self._rounds(self.shards, "batches")

    def read_share(self) -> list[float | None]:
        """Return the complete data for each."""
        return [1.0] * self.shards


class ByPieces(Reading):
    """Each process reads pieces of a stream, which does not tell how many samples they have."""

    name = "by pieces"
    ends_by_vote = True

    def sharded(self) -> dict[str, Any]:
        """Let the stream choose the pieces."""
        piece = self.loader.dataset.shard(num_shards=self.shards, index=self.shard_index)
        return {**self._smaller_batches(), "dataset": piece}


class AlreadySplit(Reading):
    """Each process reads its loader unchanged: its data is divided already."""

    name = "divided already, read as it is"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # By torch's `DistributedSampler`, whose parts are equally large.
        self.sees_all = self._batches_plainly() and adapter.deals_out(self.loader, self.shards)
        self.ends_by_vote = not self.sees_all

    def samples(self) -> int | None:
        """Return the samples of all parts if they are known, else those of this one."""
        return len(adapter.get_sampler(self.loader).dataset) if self.sees_all else super().samples()

    def counts(self) -> list[Counts]:
        """Count this process's part, and with it those of the others if all are equally large."""
        [(taken, _, batches)] = self._rounds(1, "nothing")
        if not self.sees_all:
            counts = super().counts()
            counts[self.shard_index] = (taken, 0, batches)
            return counts
        # The last shards of a `DistributedSampler` end with a repeated sample.
        sampler = adapter.get_sampler(self.loader)
        repeated = max(0, sampler.total_size - len(sampler.dataset)) if taken == len(sampler) else 0
        fills = [int(shard >= self.shards - repeated) for shard in range(self.shards)]
        return [(taken - fill, fill, batches) for fill in fills]

    def read_share(self) -> list[float | None]:
        """Return equal parts, if they are known to be."""
        return [1 / self.shards] * self.shards if self.sees_all else super().read_share()


class Dispatched(Reading):
    """The main process reads, and sends each process its part."""

    name = "main process reads and sends"
    # Whether rounds are divided by the number of samples that their batches were made of.
    counts_samples = False

    def sharded(self) -> dict[str, Any]:
        """Change no sampler: the loader divides batches."""
        loader, changes = self.loader, {}
        if iterable.is_datapipe(loader.dataset):
            # Hidden in a plain stream: torch's loader of a datapipe exchanges a seed between all processes at its start.
            changes["dataset"] = ChainDataset([loader.dataset])
        if self.counts_samples and loader.batch_sampler is not None and adapter.iterates_plainly(loader):
            changes["collate_fn"] = SizingCollate(loader.collate_fn)
        return changes

    def batch_size(self) -> int | None:
        """Return None for data that comes in batches of any size."""
        return None if self.loader.batch_sampler is None else super().batch_size()

    def counts(self) -> list[Counts]:
        """Count rounds, of which the last is divided equally."""
        return self._rounds(self.shards, "round")

    def read_share(self) -> list[float | None]:
        """Return all data for the shard of the main process."""
        return [1.0] + [0.0] * (self.shards - 1)
