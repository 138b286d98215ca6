"""The ways in which processes read the data of a loader: `build` chooses one, which then shards the loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch.utils.data import BatchSampler, DataLoader

from accelerate.data import adapter
from accelerate.data.adapter import batching_sampler, is_stream, variant
from accelerate.data.iterable import CountingCollate, IterableDatasetShard
from accelerate.data.layout import ShardLayout
from accelerate.data.samplers import BatchSamplerShard, SamplerShard


class Reading:
    """A way of reading.

    Args:
        loader: the torch loader, not sharded yet.
        layouts: the shard of each process.
        process_index: this process.
        split_batches: the loader's batch size is that of all processes together.
        even_batches: the last round is completed.

    Attributes:
        name: what the log and the data plan call it.
        parts: number of parts that the data comes in; 1 where preparing divides it by index.
        ends_by_vote: shards may end at different steps, so the processes vote in every step on whether all have a batch.
        filled_ends: real samples in each shard's last batch, where the user's own sampler has filled up some; else None.
    """

    name: ClassVar[str]
    parts = 1
    ends_by_vote = False
    filled_ends: tuple[int, ...] | None = None

    def __init__(
        self,
        loader: DataLoader,
        layouts: Sequence[ShardLayout],
        process_index: int,
        split_batches: bool,
        even_batches: bool,
    ) -> None:
        self.loader = variant(loader)  # with no workers, so that it can be pickled
        self.layouts, self.process_index = layouts, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.shards, self.shard_index = layouts[0].num_shards, layouts[process_index].shard_index
        self.batching = batching_sampler(loader)
        self.drop_last = bool(loader.drop_last or getattr(self.batching, "drop_last", False))

    def sharded(self) -> dict[str, Any]:
        """Return the attributes of the loader that change for this process, with their new values."""
        return self._smaller_batches()

    def batches_plainly(self) -> bool:
        """Return whether torch's loader and batch sampler batch the order of the samples."""
        if not adapter.iterates_plainly(self.loader):
            return False
        if is_stream(self.loader):  # how several workers divide the stream is not known
            return self.loader.num_workers < 2
        unbatched = self.loader.batch_sampler is None and not isinstance(self.batching, BatchSampler)
        return unbatched or type(self.batching) is BatchSampler

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


class ByPieces(Reading):
    """Each of several processes reads pieces of a stream, which does not tell how many samples they have."""

    name = "by pieces"
    ends_by_vote = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parts = self.shards

    def sharded(self) -> dict[str, Any]:
        """Let the stream choose the pieces."""
        piece = self.loader.dataset.shard(num_shards=self.shards, index=self.shard_index)
        return {**self._smaller_batches(), "dataset": piece}


class AlreadySplit(Reading):
    """Each process reads its loader unchanged: its data is divided already."""

    name = "divided already, read as it is"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # By torch's `DistributedSampler`, whose parts are equally large: the last of them end with a repeated sample.
        self.equal_parts = self.batches_plainly() and adapter.deals_out(self.loader, self.shards)
        self.parts, self.ends_by_vote = self.shards, self.shards > 1 and not self.equal_parts

    @property
    def repeated(self) -> int:
        """Samples that a `DistributedSampler` repeats."""
        sampler = adapter.get_sampler(self.loader)
        return max(0, sampler.total_size - len(sampler.dataset))

    @property
    def filled_ends(self) -> tuple[int, ...] | None:
        """See `Reading`."""
        if self.shards == 1 or not self.equal_parts or not self.repeated:
            return None
        size = getattr(self.batching, "batch_size", 1) // (self.shards if self.split_batches else 1)
        rest = len(adapter.get_sampler(self.loader)) % size
        if rest and self.drop_last:
            return None
        return tuple((rest or size) - (shard >= self.shards - self.repeated) for shard in range(self.shards))


class Dispatched(Reading):
    """The main process reads, and sends each process its part. An extension has the loader; `Spec.dispatch` names a subclass.

    Attributes:
        slice_fn: cuts a process's part from a batch; None if batches are divided by samples.
    """

    name = "main process reads and sends"
    slice_fn: Callable[..., Any] | None = None

    def prepared(self, dataset: Any, **options: Any) -> Any:
        """Return the `PreparedLoader`, of options that all kinds of them have."""
        raise NotImplementedError
