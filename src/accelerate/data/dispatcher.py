"""The loader that reads on one process and sends every process its part."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, pairwise, takewhile
from typing import Any

import torch
import torch.distributed as dist

from accelerate import comm
from accelerate.data import adapter, broadcast, resume
from accelerate.data.adapter import DataLoaderAdapter, placer, variant
from accelerate.data.broadcast import END, FAILED, BatchScatter, Round
from accelerate.data.loader import EpochIterator, PreparedLoader
from accelerate.data.plan import ShardLayout
from accelerate.data.resume import Pending, generators_kept, is_stateful
from accelerate.data.samplers import ReplayableRandomSampler, look_ahead, real_per_shard
from accelerate.process import PartialState

logger = logging.getLogger(__name__)

# What a reader says to those of other nodes in the place of a number of samples.
_ENDED, _FAILED = -1, -2


class _OtherFailed(RuntimeError):
    """The reader of another node has failed, and said so."""


class DataLoaderDispatcher(PreparedLoader):
    """A loader that reads on the main process only and sends each process its part of every round.

    For data that cannot be read by several processes alike, or is expensive to read. All processes iterate together, and
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
        readers: the ranks that read, in order; each serves those up to the next one, from a stream of its own.
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
        readers: Sequence[int] = (0,),
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, skip_batches, use_stateful_dataloader, iteration, **kwargs)
        self.split_batches = split_batches
        self.state = PartialState()
        self.slice_fn = slice_fn
        self.torch_device_mesh = torch_device_mesh
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.readers = tuple(readers)
        self._counts: tuple[int, ...] | None = None

    def _begin_epoch(self, pending: Pending | None) -> None:
        self.set_epoch(self.iteration)
        self._counts = None

    def _iterate(self, pending: Pending | None) -> Iterator[Any]:
        place = placer(self.state.device, self._non_blocking)
        if self._reads_ahead:
            start = self._left_out() if pending is None else pending.batches
            yield from self._hand_out_each(self._own_parts(pending, start), start, place)
            return
        for batch in self._run(pending, place):
            if self.end_of_dataloader:
                self.remainder = broadcast.batch_length(batch) or -1
            yield batch

    @property
    def _reads_ahead(self) -> bool:
        # Among several processes the next round is read, and on its way, while this one is computed.
        return self.state.num_processes > 1 or self.slice_fn is not None

    def _own_parts(self, pending: Pending | None, start: int) -> Iterator[tuple[Any, bool]]:
        """This process's part of every round, and whether that is the last, while the next one is on its way."""
        index = self._layouts[self.state.process_index].shard_index
        rounds = takewhile(lambda message: message.kind != END, self._messages(pending, start))
        for message, is_last in look_ahead(rounds):
            part, self._counts = message.batch()
            if is_last and self._counts is None:
                self.remainder = message.real * len(self.readers)
            if self.slice_fn is not None:
                ranks = {"process_index": self.state.process_index, "num_processes": self.state.num_processes}
                part = self.slice_fn(part, slice(message.start(index), message.start(index + 1)), **ranks)
            yield part, is_last

    @functools.cached_property
    def _connection(self) -> BatchScatter:
        # gloo can move device tensors only by way of the host; so the bytes had better start there.
        communicator, ranks = comm.current(), self._served()
        on_host = self.state.backend == "gloo" or communicator.group is None
        device = broadcast.CPU if on_host else self.state.device
        # A function of the user's cuts from the whole round, on every rank.
        places = None if self.slice_fn else [self._layouts[rank].shard_index % self._shards() for rank in ranks]
        if len(self.readers) == 1:
            return BatchScatter(communicator, communicator.group, comm.side_group(), device, places)
        groups = (broadcast.subgroup(communicator, ranks, host) for host in (on_host, True))
        return BatchScatter(communicator, *groups, device, places, ranks[0])

    def _served(self) -> range:
        """The ranks that receive from the reader of this one, which is the first of them."""
        bounds = (*self.readers, self.state.num_processes)
        return next(range(*each) for each in pairwise(bounds) if self.state.process_index < each[1])

    def _shards(self) -> int:
        """Number of shards that a reader serves."""
        return self._layouts[0].num_shards // len(self.readers)

    def _messages(self, pending: Pending | None, start: int) -> Iterator[Round]:
        """The rounds from `start` on: read and sent by a reader, received by the others."""
        if self.state.process_index not in self.readers:
            while True:
                yield self._connection.receive()
        alone = self.state.num_processes == 1
        send = _kept if alone else self._connection.send
        try:
            head = self._head() if start and self._layouts[0].num_shards > 1 and not self._drop_last else []
            batches = iter(EpochIterator(self, pending))
            for message in self._form_rounds(batches, self._shards(), head):
                yield send(message)
        except Exception as error:
            if not isinstance(error, _OtherFailed):
                self._exchange(_FAILED)
            send(Round(f"{type(error).__name__}: {error}", kind=FAILED))
            raise
        yield send(Round(None, kind=END))

    def _head(self) -> list[Any]:
        """Read the first round of the epoch, of which the beginning is left out, without a trace in any generator."""
        put_back, base, sampler = resume.kept(self), self.base_dataloader, self.get_sampler()
        if isinstance(sampler, ReplayableRandomSampler):
            sampler.replay = None  # drawn once more instead, like all that is drawn after it
        parts = {name: adapter.unskipped(getattr(base, name))[0] for name in ("sampler", "batch_sampler")}
        with generators_kept(self._progress.at_start):
            whole = variant(base, **parts, **({"next_iter_state": None} if is_stateful(base) else {}))
            head = list(islice(iter(whole), self._reads_per_step()))
        put_back()
        return head

    def _form_rounds(self, batches: Iterator[Any], shards: int, first: Sequence[Any] = ()) -> Iterator[Round]:
        """Join, complete and divide batches into rounds; `first` are those of the epoch's first round.

        The division of a round that the shards cannot share equally depends on whether it is the last.
        """
        per_round = self._reads_per_step()
        groups: Iterator[list[Any]] = iter(lambda: list(islice(batches, per_round)), [])
        if self._drop_last:
            groups = (group for group in groups if len(group) == per_round)
        head = held = None
        for group in chain(groups, [()]):
            real = sum(map(_length, group)) if group else _ENDED
            of_readers = self._exchange(real)
            if held is not None:
                yield _divided(*held, shards, head, is_last=not group)
                held = None
            if _ENDED in of_readers:
                if group:
                    logger.warning(
                        f"Rank {self.state.process_index} reads for its node and had at least one step more, which this epoch "
                        "leaves out: all processes stop when the first node has no more."
                    )
                return
            batch = broadcast.join(group)
            if head is None:
                head = broadcast.take(broadcast.join(first) if first else batch, 0, shards)
            if any(each != real for each in of_readers) or (real % shards and len(of_readers) > 1):
                yield _completed(batch, real, shards, head, of_readers)
            elif real % shards:
                held = batch, real
            else:
                yield Round(batch, None, real, real // shards, shards)

    def _exchange(self, real: int) -> list[int]:
        """The samples that each reader has for a round, or how it ended; where another one failed, this one does, too."""
        if len(self.readers) == 1:
            return [real]
        group = broadcast.subgroup(comm.current(), self.readers, on_host=True)
        found = torch.zeros(len(self.readers), dtype=torch.int64)
        found[self.readers.index(self.state.process_index)] = real
        dist.all_reduce(found, group=group)
        failed = [rank for rank, each in zip(self.readers, found.tolist(), strict=True) if each == _FAILED]
        if failed and real != _FAILED:
            raise _OtherFailed(f"The reader of another node failed: rank {failed[0]}. All processes stop here.")
        return found.tolist()

    # What is known about the data ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        batches, per_round = DataLoaderAdapter.__len__(self), self._reads_per_step()
        rounds = batches // per_round if self._drop_last else -(-batches // per_round)
        return max(0, rounds - self.skip_batches)

    def _batches_per_step(self) -> int:
        return len(self.readers) if self.split_batches else self._layouts[0].num_shards

    def _reads_per_step(self) -> int:
        return 1 if self.split_batches else self._shards()

    @functools.cached_property
    def _layouts(self) -> list[ShardLayout]:
        return ShardLayout.of_all(self.state.num_processes, self.torch_device_mesh)

    @property
    def batch_counts(self) -> tuple[int, ...] | None:
        """Number of real samples in each shard's batch of the round yielded last; None if all samples are real."""
        return self._counts


def _kept(message: Round) -> Round:
    return message._replace(batch=lambda: (message.batch, message.counts))


def _divided(batch: Any, real: int, shards: int, head: Any, is_last: bool) -> Round:
    share, rest = divmod(real, shards)
    if share and not is_last:
        # A sampler whose batches vary in size: no shard gets duplicates in the middle of an epoch.
        return Round(batch, None, real, share + 1, rest)
    return _completed(batch, real, shards, head, [real])


def _completed(batch: Any, real: int, shards: int, head: Any, of_readers: Sequence[int]) -> Round:
    """A round that is filled with the samples of `head` to the width that the reader with the most samples needs."""
    width = -(-max(of_readers) // shards)
    counts = sum((real_per_shard(each, width, shards) for each in of_readers), ())
    return Round(broadcast.padded(batch, real, head, width * shards), counts, real, width, shards)


def _length(batch: Any) -> int:
    length = broadcast.batch_length(batch)
    if length is None:
        raise ValueError(
            f"A batch of type {type(batch).__name__} has no tensor or list with a first dimension of samples, so it "
            "cannot be divided among processes. Let the collate_fn return one, or use dispatch_batches=False."
        )
    return length
