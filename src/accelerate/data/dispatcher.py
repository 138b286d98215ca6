"""The loader that reads on one process and sends every process its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from accelerate import comm
from accelerate.data import pieces, resume
from accelerate.data.adapter import DataLoaderAdapter
from accelerate.data.loader import PreparedLoader
from accelerate.data.placement import placer
from accelerate.data.plan import ShardLayout
from accelerate.data.shards import look_ahead
from accelerate.data.state import Pending
from accelerate.data.wire import Message, ObjectWire, Transport, Wire
from accelerate.process import PartialState
from accelerate.runtime import traits


class DataLoaderDispatcher(PreparedLoader):
    """A loader that reads on the main process only and sends each process its part of every round.

    For data that cannot be read by several processes alike: a stream that is not reproducible, or that is expensive to
    read. All processes iterate together; leaving the loop early has to happen at the same batch everywhere.

    A last round that the processes cannot share equally is completed with the first samples of the epoch, or dropped
    with `_drop_last`.

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
        >>> loader = DataLoaderDispatcher(range(6), batch_size=4)  # on every process; here there is one
        >>> [batch.tolist() for batch in loader]
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
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            iteration=iteration,
            **kwargs,
        )
        self.split_batches = split_batches
        self.state = PartialState()
        self.slice_fn = slice_fn
        self.torch_device_mesh = torch_device_mesh
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._wire: Wire | None = None
        self._counts: tuple[int, ...] | None = None

    def __iter__(self) -> Iterator[Any]:
        if (instead := resume.instead_of(self)) is not None:
            yield from instead
            return
        pending = self._begin()
        try:
            self.set_epoch(self.iteration)
            resume.note_start(self)
            self._counts = None
            if self.state.num_processes == 1 and self.slice_fn is None:
                yield from self._watched(self._run_alone(pending))
            else:
                yield from self._watched(self._run_together(self._layout(), pending))
        finally:
            self.end()

    def __reduce_ex__(self, protocol: int) -> Any:
        rebuild, (inner, cls, state) = super().__reduce_ex__(protocol)
        return rebuild, (inner, cls, {**state, "_wire": None})

    # One process: nothing to send -------------------------------------------------------------------------------------

    @property
    def _reads_ahead(self) -> bool:
        # Among several processes the next round is read, and on its way, while this one is computed.
        return self.state.num_processes > 1 or self.slice_fn is not None

    def _run_alone(self, pending: Pending | None) -> Iterator[Any]:
        reading = self._open(pending)
        reading.batches = self._keeping_states(reading.batches)
        for batch in self._run(reading, placer(self.state.device, self._non_blocking)):
            if self.end_of_dataloader:
                self.remainder = pieces.batch_length(batch) or -1
            yield batch

    # Several processes ------------------------------------------------------------------------------------------------

    def _run_together(self, layout: ShardLayout, pending: Pending | None) -> Iterator[Any]:
        """Yield this process's part of every round."""
        progress = self._progress
        place = placer(self.state.device, self._non_blocking)
        reads = self.state.process_index == 0
        rounds, number = self._send_rounds(layout, pending) if reads else self._receive_rounds(layout, pending)
        progress.batches, progress.at_end = number, False
        for message in rounds:
            number += 1
            progress.batches = number
            if message.real < sum(message.sizes):
                self._counts = _real_counts(message)
            self._hand_out(is_last=message.last)
            if message.last:
                self.remainder = message.real
            yield place(self._part(message, layout.shard_index))
        progress.batches = progress.extra_samples = 0
        progress.before_read = None
        progress.epoch += 1

    def _part(self, message: Message, shard: int) -> Any:
        start = sum(message.sizes[:shard])
        stop = start + message.sizes[shard]
        if self.slice_fn is None:
            return pieces.take(message.batch, start, stop)
        return self.slice_fn(
            message.batch,
            slice(start, stop),
            process_index=self.state.process_index,
            num_processes=self.state.num_processes,
        )

    def _wire_between(self, layout: ShardLayout) -> Wire | None:
        if self._wire is None and self.state.num_processes > 1:
            transport = Transport(comm.current())
            if traits.of(self.state.distributed_type).torch_distributed:
                # gloo can move device tensors only by way of the host; so the bytes had better start there.
                device = torch.device("cpu") if self.state.backend == "gloo" else self.state.device
                self._wire = Wire(transport, layout.num_shards, device)
            else:
                self._wire = ObjectWire(transport, layout.num_shards, self.state.device)
        return self._wire

    def _receive_rounds(self, layout: ShardLayout, pending: Pending | None) -> tuple[Iterator[Message], int]:
        wire = self._wire_between(layout)
        start = self._left_out() if pending is None else pending.batches
        self._progress.replaying = False

        def messages() -> Iterator[Message]:
            last = False
            while not last:
                message = wire.receive()
                if message is None:
                    return
                last = message.last
                yield message

        return messages(), start

    def _send_rounds(self, layout: ShardLayout, pending: Pending | None) -> tuple[Iterator[Message], int]:
        wire = self._wire_between(layout)
        try:
            reading = self._open(pending)
        except Exception as error:
            if wire is not None:
                wire.fail(error)
            raise
        rounds, start = self._form_rounds(reading.batches, layout.num_shards, reading.head), reading.start

        def messages() -> Iterator[Message]:
            last = False
            while not last:
                try:
                    message = next(rounds, None)
                except Exception as error:
                    if wire is not None:
                        wire.fail(error)
                    raise
                if message is None:
                    if wire is not None:
                        wire.finish()
                    return
                if wire is not None:
                    wire.send(message)
                last = message.last
                yield message

        return messages(), start

    def _needs_head(self) -> bool:
        return self._layout().num_shards > 1 and not self._drop_last

    def _form_rounds(self, batches: Iterator[Any], shards: int, first: Sequence[Any] = ()) -> Iterator[Message]:
        """Join, complete and divide batches into rounds, one read ahead; `first` are those of the epoch's first round."""
        per_round = self._reads_per_step()
        groups: Iterator[list[Any]] = iter(lambda: list(islice(batches, per_round)), [])
        groups = self._keeping_states(groups)
        if self._drop_last:
            groups = (group for group in groups if len(group) == per_round)
        head = None
        for group, is_last in look_ahead(groups):
            batch, real = pieces.join(group), sum(_length(batch) for batch in group)
            if head is None:
                head = pieces.take(pieces.join(first) if first else batch, 0, shards)
            share, rest = divmod(real, shards)
            if rest and share and not is_last:
                # A sampler whose batches vary in size: nobody gets duplicates in the middle of an epoch.
                yield Message(batch, real, tuple(share + (shard < rest) for shard in range(shards)), is_last)
                continue
            if rest:
                share += 1
                batch = pieces.padded(batch, real, head, share * shards)
            yield Message(batch, real, (share,) * shards, is_last)

    # What is known about the data -------------------------------------------------------------------------------------

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

    @property
    def counts_known(self) -> bool:
        """Always true: the process that reads knows what it adds."""
        return True


def _length(batch: Any) -> int:
    length = pieces.batch_length(batch)
    if length is None:
        raise ValueError(
            f"A batch of type {type(batch).__name__} has no tensor or list with a first dimension of samples, so it "
            "cannot be divided among processes. Let the collate_fn return one, or use dispatch_batches=False."
        )
    return length


def _real_counts(message: Message) -> tuple[int, ...]:
    """Real samples per shard; they come first in the order of the shards."""
    left, counts = message.real, []
    for size in message.sizes:
        counts.append(min(left, size))
        left -= counts[-1]
    return tuple(counts)
