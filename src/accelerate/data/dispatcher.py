"""The loader that reads on one process and sends every process its part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from accelerate import comm
from accelerate.data import adapter, broadcast, resume
from accelerate.data.adapter import DataLoaderAdapter, placer, variant
from accelerate.data.broadcast import BatchBroadcast, Message
from accelerate.data.loader import PreparedLoader
from accelerate.data.plan import ShardLayout
from accelerate.data.resume import Pending, generators_kept, is_stateful
from accelerate.data.samplers import ReplayableRandomSampler, look_ahead, real_per_shard
from accelerate.process import PartialState


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

    def _begin_epoch(self) -> None:
        self.set_epoch(self.iteration)
        self._counts = None

    def _iterate(self, pending: Pending | None) -> Iterator[Any]:
        return self._run_together(pending) if self._reads_ahead else self._run_alone(pending)

    @property
    def _reads_ahead(self) -> bool:
        # Among several processes the next round is read, and on its way, while this one is computed.
        return self.state.num_processes > 1 or self.slice_fn is not None

    def _run_alone(self, pending: Pending | None) -> Iterator[Any]:
        for batch in self._run(pending, placer(self.state.device, self._non_blocking)):
            if self.end_of_dataloader:
                self.remainder = broadcast.batch_length(batch) or -1
            yield batch

    def _run_together(self, pending: Pending | None) -> Iterator[Any]:
        """Yield this process's part of every round."""
        progress, layout = self._progress, self._layout()
        place = placer(self.state.device, self._non_blocking)
        number = self._left_out() if pending is None else pending.batches
        progress.batches, progress.at_end = number, False
        for message in self._rounds(pending, number):
            number += 1
            progress.batches = number
            start = sum(message.sizes[: layout.shard_index])
            stop = start + message.sizes[layout.shard_index]
            if message.real < sum(message.sizes):
                self._counts = real_per_shard(message.real, message.sizes[0], layout.num_shards)
            self._hand_out(is_last=message.last)
            if message.last:
                self.remainder = message.real
            if self.slice_fn is None:
                part = broadcast.take(message.batch, start, stop)
            else:
                ranks = {"process_index": self.state.process_index, "num_processes": self.state.num_processes}
                part = self.slice_fn(message.batch, slice(start, stop), **ranks)
            yield place(part)
            if message.last:
                break
        self._finish_epoch()

    @functools.cached_property
    def _connection(self) -> BatchBroadcast:
        # gloo can move device tensors only by way of the host; so the bytes had better start there.
        communicator = comm.current()
        on_host = self.state.backend == "gloo" or communicator.group is None
        return BatchBroadcast(communicator, torch.device("cpu") if on_host else self.state.device)

    def _rounds(self, pending: Pending | None, start: int) -> Iterator[Message]:
        """The rounds from `start` on: read, and sent before they are yielded, on the main process; received on the others."""
        if self.state.process_index > 0:
            self._progress.replaying = False
            yield from iter(self._connection.receive, None)
            return
        send = self._connection.send if self.state.num_processes > 1 else lambda message: None
        try:
            shards = self._layout().num_shards
            head = self._head() if start and shards > 1 and not self._drop_last else []
            batches, _, _ = self._open(pending)
            for message in self._form_rounds(batches, shards, head):
                send(message)
                yield message
        except Exception as error:
            send(f"{type(error).__name__}: {error}")
            raise
        send(None)

    def _head(self) -> list[Any]:
        """Read the first round of the epoch, of which the beginning is left out, without a trace in any generator."""
        put_back, base, sampler = resume.kept(self), self.base_dataloader, self.get_sampler()
        if isinstance(sampler, ReplayableRandomSampler):
            sampler.replay = None  # drawn once more instead, like all that is drawn after it
        parts = {name: adapter.unskipped(getattr(base, name))[0] for name in ("sampler", "batch_sampler")}
        with generators_kept():
            if self._progress.at_start is not None:
                resume.set_states(self._progress.at_start)
            whole = variant(base, **parts, **({"next_iter_state": None} if is_stateful(base) else {}))
            head = list(islice(iter(whole), self._reads_per_step()))
        put_back()
        return head

    def _form_rounds(self, batches: Iterator[Any], shards: int, first: Sequence[Any] = ()) -> Iterator[Message]:
        """Join, complete and divide batches into rounds, one read ahead; `first` are those of the epoch's first round."""
        per_round = self._reads_per_step()
        groups: Iterator[list[Any]] = iter(lambda: list(islice(batches, per_round)), [])
        if self._drop_last:
            groups = (group for group in groups if len(group) == per_round)
        head = None
        for group, is_last in look_ahead(groups):
            batch, real = broadcast.join(group), sum(_length(batch) for batch in group)
            if head is None:
                head = broadcast.take(broadcast.join(first) if first else batch, 0, shards)
            share, rest = divmod(real, shards)
            if rest and share and not is_last:
                # A sampler whose batches vary in size: no shard gets duplicates in the middle of an epoch.
                yield Message(batch, real, tuple(share + (shard < rest) for shard in range(shards)), is_last)
                continue
            if rest:
                share += 1
                batch = broadcast.padded(batch, real, head, share * shards)
            yield Message(batch, real, (share,) * shards, is_last)

    # What is known about the data ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        batches, per_round = DataLoaderAdapter.__len__(self), self._reads_per_step()
        rounds = batches // per_round if self._drop_last else -(-batches // per_round)
        return max(0, rounds - self.skip_batches)

    def _samples_per_step(self) -> int | None:
        size = super()._samples_per_step()
        return size if size is None or self.split_batches else size * self._layout().num_shards

    def _reads_per_step(self) -> int:
        return 1 if self.split_batches else self._layout().num_shards

    def _layout(self) -> ShardLayout:
        return ShardLayout.of(self.state.num_processes, self.state.process_index, self.torch_device_mesh)

    @property
    def batch_counts(self) -> tuple[int, ...] | None:
        """Number of real samples in each shard's batch of the round yielded last; None if all samples are real."""
        return self._counts


def _length(batch: Any) -> int:
    length = broadcast.batch_length(batch)
    if length is None:
        raise ValueError(
            f"A batch of type {type(batch).__name__} has no tensor or list with a first dimension of samples, so it "
            "cannot be divided among processes. Let the collate_fn return one, or use dispatch_batches=False."
        )
    return length
