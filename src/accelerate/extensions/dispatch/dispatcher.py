"""The loader that reads on one process and sends every process its part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from accelerate import comm
from accelerate.data import resume
from accelerate.data.adapter import DataLoaderAdapter, placer, restarted
from accelerate.data.iterable import CollateWrapper
from accelerate.data.layout import ShardLayout
from accelerate.data.loader import PreparedLoader
from accelerate.data.progress import Position
from accelerate.data.samplers import EndAhead, ReplayableRandomSampler, Rounds, unskipped
from accelerate.extensions.dispatch.dividing import Divider, agreed_length, first_length, shares
from accelerate.extensions.dispatch.scatter import CPU, Received, Scatter
from accelerate.process import PartialState
from accelerate.runtime import generators

# In place of a round's number of samples: there are no more rounds, or reading failed.
ENDED, FAILED = -1, -2


class Round(NamedTuple):
    """The parts of all shards in one step, or one part for all of them.

    Attributes:
        samples: samples in it, without duplicates; 0 if that is not known.
        counts: samples of each shard without duplicates; None if no shard has duplicates.
    """

    parts: Sequence[Any]
    samples: int
    counts: tuple[int, ...] | None = None


class Group(NamedTuple):
    """The batches that are read for one step, and the number of samples of each, 0 if it is not known."""

    batches: Sequence[Any]
    sizes: Sequence[int]

    def divided(self, divider: Divider, shards: int, joined: bool, fill: Group | None = None) -> Round:
        """Give each shard its unchanged batch, or divide all samples into shares that differ by one sample at most.

        Args:
            divider: divides and joins batches.
            shards: number of shards.
            joined: join the batches into one part for all shards instead.
            fill: batches whose samples are appended until all shards have equally many.
        """
        batches, sizes, counts = self.batches, self.sizes, None
        samples = total = sum(sizes)
        if fill is not None:
            if not sum(fill.sizes):
                raise divider.refusal(
                    "it has to be filled up, and batches of this epoch have an uncertain number of samples"
                )
            rounds = Rounds(-(-samples // shards), shards)
            total, counts = rounds.total, rounds.real(samples)
            copies = -(-(total - samples) // sum(fill.sizes))
            batches, sizes = [*batches, *fill.batches * copies], [*sizes, *fill.sizes * copies]
        elif not joined and len(batches) == shards and len(set(sizes)) == 1:
            return Round(batches, samples)
        bounds = [(0, total)] if joined else shares(total, shards)
        return Round(divider.divide(batches, sizes, bounds, len(self.batches)), samples, counts)


class SizingCollate(CollateWrapper):
    """Pairs each batch with the number of samples that it was made of."""

    def __call__(self, samples: Any) -> tuple[Any, int]:
        return self.collate_fn(samples), len(samples)


class DataLoaderDispatcher(PreparedLoader):
    """A loader that reads on the main process only and sends each process its part of every round.

    For data that cannot be read by several processes, or is expensive to read. All processes iterate together, and
    leave the loop at the same batch. A last round that cannot be shared equally is completed with the first samples.

    Args:
        dataset: the dataset to load from.
        split_batches: cut each batch of the wrapped loader into parts, instead of joining one batch per process.
        skip_batches: number of batches of a stream to read and drop at the beginning of each iteration.
        use_stateful_dataloader: wrap torchdata's `StatefulDataLoader`.
        _drop_last: drop an incomplete last round.
        _non_blocking: let copies from pinned memory overlap with computation.
        slice_fn: cuts a part from a round: `slice_fn(batch, slice, process_index=..., num_processes=...)`.
        torch_device_mesh: ranks that differ only along its `tp`, `cp` or `sp` dimension receive the same part.
        iteration: the epoch that the first iteration is.
        **kwargs: arguments of the wrapped loader.

    Example:
        >>> [batch.tolist() for batch in DataLoaderDispatcher(range(6), batch_size=4)]  # on every process; here one
        [[0, 1, 2, 3], [4, 5]]
    """

    __module__ = "accelerate.data_loader"

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any | None = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, skip_batches, use_stateful_dataloader, iteration, **kwargs)
        self.split_batches = split_batches
        self.state = PartialState()
        self.slice_fn = slice_fn
        self.torch_device_mesh = torch_device_mesh
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._counts: tuple[int, ...] | None = None

    def _begin_epoch(self, position: Position | None) -> None:
        self.set_epoch(self.iteration)
        self._counts = None

    def _iterate(self, position: Position | None) -> Iterator[Any]:
        place = placer(self.state.device, self._non_blocking)
        if self._reads_ahead:
            first_step = self._steps_skipped() if position is None else position.batches
            rounds = EndAhead(self._exchanged(position, first_step))
            yield from self._hand_out_each(self._parts_of(rounds), rounds, first_step, place)
            return
        for batch in self._run(position, place):
            if self.end_of_dataloader:
                self.remainder = agreed_length(batch) or -1
            yield batch

    @property
    def _may_fill_uncounted(self) -> bool:
        # Among several processes `batch_counts` tells of every filled round. One process may get batches filled by the caller.
        return self.state.num_processes == 1

    @property
    def _reads_ahead(self) -> bool:
        # Among several processes the next round is read, and on its way, while this one is computed.
        return self.state.num_processes > 1 or self.slice_fn is not None

    def _parts_of(self, rounds: EndAhead) -> Iterator[Any]:
        """Yield this process's part of every round, while the next round is on its way."""
        shard = self._layouts[self.state.process_index].shard_index
        for samples, wait in rounds:
            part, self._counts = wait()
            if rounds.ended and self._counts is None:
                self.remainder = samples
            if self.slice_fn is not None:
                total = samples if self._counts is None else self._counts[0] * self._shards
                ranks = {"process_index": self.state.process_index, "num_processes": self.state.num_processes}
                part = self.slice_fn(part, slice(*shares(total, self._shards)[shard]), **ranks)
            yield part

    @functools.cached_property
    def _connection(self) -> Scatter:
        # gloo can move device tensors only by way of the host, so their bytes start there.
        communicator = comm.current()
        on_host = self.state.backend == "gloo" or communicator.group is None
        device = CPU if on_host else self.state.device
        # A function of the user's slices the full round, on every rank.
        places = None if self.slice_fn else [layout.shard_index for layout in self._layouts]
        return Scatter(communicator, communicator.group, comm.side_group(), device, places)

    @property
    def _shards(self) -> int:
        return self._layouts[0].num_shards

    def _exchanged(self, position: Position | None, first_step: int) -> Iterator[Received]:
        """Yield samples and part of each round from `first_step` on: read and sent by rank 0, received by the others."""
        if self.state.process_index != 0:
            while (message := self._connection.receive())[0] != ENDED:
                if message[0] == FAILED:
                    raise RuntimeError(f"The dispatching process could not read its next batch: {message[1]()}")
                yield message
            return
        send = _hand_over if self.state.num_processes == 1 else self._connection.send
        try:
            fill = self._first_reads() if first_step and self._shards > 1 and not self._drop_last else []
            for parts, samples, counts in self._form_rounds(iter(self._epoch(position)), fill):
                yield send(samples, [(part, counts) for part in parts])
        except Exception as error:
            send(FAILED, [f"{type(error).__name__}: {error}"])[1]()
            raise
        send(ENDED, [None])[1]()

    def _first_reads(self) -> list[Any]:
        """Read the first round of an epoch that begins later, without a trace in any generator."""
        put_back, base, sampler = resume.kept(self), self.base_dataloader, self.get_sampler()
        if isinstance(sampler, ReplayableRandomSampler):
            sampler.replay = None  # drawn once more instead, like all that is drawn after it
        parts = {name: unskipped(getattr(base, name))[0] for name in ("sampler", "batch_sampler")}
        with generators.kept(self._progress.start.generators):
            unskipped_base = restarted(base, **parts)
            reads = list(islice(iter(unskipped_base), self._reads_per_step()))
        put_back()
        return reads

    def _form_rounds(self, batches: Iterator[Any], first_reads: Sequence[Any]) -> Iterator[Round]:
        """Form rounds of the batches read; `first_reads` are those of the epoch's first round, if it begins later.

        The division of a round that the shards cannot share equally depends on whether it is the last.
        """
        per_round, joined, shards = self._reads_per_step(), self.slice_fn is not None, self._shards
        steps: Iterator[Sequence[Any]] = iter(lambda: list(islice(batches, per_round)), [])
        if self._drop_last:
            steps = (reads for reads in steps if len(reads) == per_round)
        divider, unequal = self._divider(), None
        first = self._group(divider, first_reads) if first_reads else None
        for reads in chain(steps, [()]):
            group = self._group(divider, reads) if reads else None
            if unequal is not None:
                # A sampler whose batches vary in size: no shard gets duplicates in the middle of an epoch.
                in_the_middle = group is not None and sum(unequal.sizes) >= shards
                yield unequal.divided(divider, shards, joined, None if in_the_middle else first)
                unequal = None
            if group is None:
                return
            first = first or group
            divider.witness = (first.batches[0], first.sizes[0]) if sum(first.sizes) else None
            if sum(group.sizes) % shards:
                unequal = group
            else:
                yield group.divided(divider, shards, joined)

    def _group(self, divider: Divider, reads: Sequence[Any]) -> Group:
        """Count the samples of the batches of a step; ValueError if they are not known and the step has to be divided."""
        counted = isinstance(self.base_dataloader.collate_fn, SizingCollate)
        batches, sizes = zip(*reads, strict=True) if counted else (reads, [None] * len(reads))
        if self.slice_fn is not None:
            lengths = [
                first_length(batch) if size is None else size for batch, size in zip(batches, sizes, strict=True)
            ]
            return Group(batches, lengths)
        full = len(batches) == self._shards
        if full and not counted:
            sizes = [agreed_length(batch) for batch in batches]
            if None in sizes:
                return Group(batches, [0] * len(batches))
        if not full or len(set(sizes)) > 1:
            sizes = [divider.size(batch, size) for batch, size in zip(batches, sizes, strict=True)]
        return Group(batches, sizes)

    def _divider(self) -> Divider:
        base, remedies = self.base_dataloader, ["a collate_fn that returns one row or list item per sample"]
        collate_fn = self.collate_fn if base.batch_sampler is not None else None
        if base.batch_size is not None:
            skip = "drop_last=True in the DataLoader, which skips an incomplete last step"
            remedies.append(f"split_batches=False and {skip}" if self.split_batches else skip)
        remedies.append("DataLoaderConfiguration(dispatch_batches=False), which lets each rank read its own batches")
        return Divider(collate_fn is not default_collate, f"Use {'; or '.join(remedies)}.", self.slice_fn is None)

    # What is known about the data ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        batches, per_round = DataLoaderAdapter.__len__(self), self._reads_per_step()
        rounds = batches // per_round if self._drop_last else -(-batches // per_round)
        return max(0, rounds - self.skip_batches)

    def _batches_per_step(self) -> int:
        return 1 if self.split_batches else self._shards

    def _reads_per_step(self) -> int:
        return self._batches_per_step()

    @functools.cached_property
    def _layouts(self) -> list[ShardLayout]:
        return ShardLayout.of_all(self.state.num_processes, self.torch_device_mesh)

    @property
    def batch_counts(self) -> tuple[int, ...] | None:
        """Number of real samples in each shard's batch of the round yielded last; None if all samples are real."""
        return self._counts


def _hand_over(number: int, parts: Sequence[Any]) -> Received:
    """Take the place of `Scatter.send` where one process reads for itself."""
    return number, lambda: parts[0]
