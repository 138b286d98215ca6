"""The loader that reads on one process and sends every process its part.

A message is a header of integers, over the host, and what belongs to each rank: a description, which is the pickled part
without its tensors, over the host, and only where it is not the one before; and a body, the bytes of the tensors, over the
group of the device. The body is on its way while the ranks compute.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from accelerate import comm
from accelerate.comm.base import Communicator
from accelerate.data import generators, resume
from accelerate.data.adapter import CPU, DataLoaderAdapter, is_stateful, placer, variant
from accelerate.data.loader import EpochIterator, PreparedLoader
from accelerate.data.plan import ShardLayout
from accelerate.data.progress import Pending
from accelerate.data.samplers import EndAhead, ReplayableRandomSampler, Rounds, unskipped
from accelerate.process import PartialState
from accelerate.runtime import simulated
from accelerate.utils.nested import leaves, over_leaves

logger = logging.getLogger(__name__)

# Batches: nested structures whose leaves have the samples along their first dimension. A leaf is a tensor, an array of NumPy, or a
# list without tensors inside (`default_collate` leaves strings as such a list), whose items are one sample each.


def is_column(value: Any) -> bool:
    """Whether a list or tuple holds plain values, one per sample."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields") or not value:
        return False
    return not any(isinstance(item, (torch.Tensor, Mapping, list, tuple)) for item in value)


def samples_of(leaf: Any) -> int | None:
    """Number of samples in a leaf; None if it belongs to the batch as a whole."""
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        return leaf.shape[0] if leaf.ndim else None
    return len(leaf) if is_column(leaf) else None


def batch_length(batch: Any) -> int | None:
    """Number of samples in a batch, from its first leaf that has samples; None if there is none."""
    return next((length for length in map(samples_of, leaves(batch, is_column)) if length is not None), None)


def take(batch: Any, start: int, stop: int) -> Any:
    """The samples from `start` to `stop`; leaves that hold no samples stay whole."""
    return over_leaves(lambda leaf: leaf if samples_of(leaf) is None else leaf[start:stop], batch, is_leaf=is_column)


def join(batches: Sequence[Any], filling: bool = False) -> Any:
    """Put batches one after the other, or fill up the first one, whose leaves without samples stay then.

    ValueError: their structures differ, or leaves without samples do where nothing is filled up.
    """
    if len(batches) == 1:
        return batches[0]
    try:
        return over_leaves(functools.partial(_join_leaves, filling), *batches, is_leaf=is_column)
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            "Batches cannot be joined for dispatching, because they differ in structure or in the shape of a sample "
            f"({error}). Let the collate_fn pad them to one shape, or use split_batches=True or dispatch_batches=False."
        ) from error


def _join_leaves(filling: bool, *leaves: Any) -> Any:
    first = leaves[0]
    if samples_of(first) is None:
        if not (filling or all(leaf is first or leaf == first for leaf in leaves[1:])):
            raise ValueError(f"{first!r} is the same for all samples of a batch, and the next batch has {leaves[1]!r}")
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(leaves)
    if isinstance(first, np.ndarray):
        return np.concatenate(leaves)
    return type(first)(item for leaf in leaves for item in leaf)


def padded(batch: Any, length: int, head: Any, size: int) -> Any:
    """Lengthen a batch of `length` samples to `size` with the samples of `head`, over and over."""
    copies, rest = divmod(size - length, batch_length(head))
    return join([batch, *[head] * copies, *([take(head, 0, rest)] if rest else [])], filling=True)


# Messages --------------------------------------------------------------------------------------------------------------

# In the place of a round's number of samples: there are no more rounds, or reading failed.
ENDED, FAILED = -1, -2
ALIGNMENT = 64


class Round(NamedTuple):
    """The samples of all shards in one step, `real` ones first: `width` for each shard, one less from shard `longer` on.

    With `ENDED` or `FAILED` for `real` it is none: `batch` says why. Of a round on its way, `batch` is a function that waits for this process's part, and for `counts`: the real samples of each
    shard of all processes, if not all are.
    """

    batch: Any
    counts: tuple[int, ...] | None = None
    real: int = 0
    width: int = 0
    longer: int = 0

    @classmethod
    def of(cls, batch: Any, real: int, shards: int) -> Round:
        """A batch as it is, in shares that differ by one sample at most."""
        return cls(batch, None, real, -(-real // shards), real % shards or shards)

    def completed(self, head: Any, shards: int, of_readers: Sequence[int]) -> Round:
        """The same, filled with the samples of `head` to the width that the reader with the most samples needs."""
        rounds = Rounds(-(-max(of_readers) // shards), shards)
        counts = sum(map(rounds.real, of_readers), ())
        return Round(padded(self.batch, self.real, head, rounds.total), counts, self.real, rounds.size, shards)

    def start(self, shard: int) -> int:
        """Number of samples before a shard."""
        return shard * self.width - max(0, shard - self.longer)


def aligned(size: int) -> int:
    """Round up, so that every tensor in the body starts where its dtype may."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Pickler(pickle.Pickler):
    """Describes a part: pickles it without its tensors, of which dtype and shape stay."""

    def __init__(self, part: Any) -> None:
        file = io.BytesIO()
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.dump(part)
        self.description = file.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        self.tensors.append(obj.detach().cpu().contiguous().view(-1).view(torch.uint8))
        return obj.dtype, tuple(obj.shape)


class _Unpickler(pickle.Unpickler):
    """Puts tensors back, which share the memory of the body."""

    def __init__(self, description: bytes, body: torch.Tensor) -> None:
        super().__init__(io.BytesIO(description))
        self.rest = body

    def persistent_load(self, pid: Any) -> torch.Tensor:
        dtype, shape = pid
        size = dtype.itemsize * math.prod(shape)
        part, self.rest = self.rest[:size], self.rest[aligned(size) :]
        return part.view(dtype).view(shape)


class BatchScatter:
    """One end of the connection between the rank that reads and those that it serves; all use it in step.

    `places` says which part of a round each rank of the group gets; None gives all of them the whole.
    """

    def __init__(
        self,
        communicator: Communicator,
        group: Any,
        host_group: Any,
        device: torch.device,
        places: Sequence[int] | None,
        reader: int = 0,
    ) -> None:
        self.communicator, self.device, self.places, self.reader = communicator, device, places, reader
        self.parts = 1 if places is None else max(places) + 1
        self.group, self.host_group = group, host_group
        self.sequence, self.descriptions = 0, []

    def send(self, message: Round) -> Round:
        """Send a round, or what stands in its place; return what `receive` returns on the others."""
        # Everything is laid out before anything is sent: the others hear of what fails here.
        starts = [message.start(part) for part in range(self.parts + 1)]
        whole = self.places is None or message.real < 0
        parts = [message.batch if whole else take(message.batch, *bounds) for bounds in pairwise(starts)]
        described = [_Pickler((part, message.counts)) for part in parts]
        body = _rows([each.tensors for each in described], pinned=self.device.type == "cuda")
        before, self.descriptions = self.descriptions, [each.description for each in described]
        news = _rows([[torch.frombuffer(bytearray(text), dtype=torch.uint8)] for text in self.descriptions])
        size = 0 if self.descriptions == before else news.shape[1]
        self._on_host(torch.tensor([self.sequence, *message[2:], size, body.shape[1]]))
        self.sequence += 1
        waits = [self._share(size, CPU, news)[1], self._share(body.shape[1], self.device, body)[1]]
        return message._replace(batch=lambda: ([wait() for wait in waits], (parts[0], message.counts))[1])

    def receive(self) -> Round:
        """Wait for the next header and begin to receive; RuntimeError if the sender failed or is ahead."""
        sequence, *numbers, news, size = self._on_host(torch.empty(6, dtype=torch.int64)).tolist()
        if sequence != self.sequence:
            raise RuntimeError(
                f"This process waits for message {self.sequence} of the dispatching process, but {sequence} came: the "
                "processes are not in step. Leave the loop over a dispatched loader at the same batch on all of them."
            )
        self.sequence += 1
        if news:
            row, wait = self._share(news, CPU)
            wait()
            self.descriptions = [row.numpy().tobytes()]
        [description], (body, wait) = self.descriptions, self._share(size, self.device)
        message = Round(lambda: (wait(), _Unpickler(description, body).load())[1], None, *numbers)
        if message.real == FAILED:
            raise RuntimeError(f"The dispatching process could not read its next batch: {message.batch()[0]}")
        return message

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast a tensor of the host; return the reader's."""
        if self.host_group is None:  # no torch.distributed: torch_xla
            return self.communicator.broadcast_object_list([tensor], 0)[0]
        dist.broadcast(tensor, self.reader, group=self.host_group)
        return tensor

    def _share(
        self, size: int, device: torch.device, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Callable[[], Any]]:
        """Begin to give each rank its row of a matrix of bytes; return the row, and a function that waits for it."""
        row = torch.empty(size, dtype=torch.uint8, device=device)
        if not size:
            return row, lambda: None
        if self.host_group is None:
            place = 0 if self.places is None else self.places[self.communicator.rank]
            row.copy_(self.communicator.broadcast_object_list([rows], 0)[0][place])
            return row, lambda: None
        if rows is not None:
            rows = rows.to(device, non_blocking=True)  # from pinned memory: the host does not wait for the device
        group = self.host_group if device.type == "cpu" else self.group
        if self.parts == 1:
            row = row if rows is None else rows[0]
            return row, dist.broadcast(row, self.reader, group=group, async_op=True).wait
        each = None if rows is None else [rows[place] for place in self.places]
        return row, dist.scatter(row, each, self.reader, group=group, async_op=True).wait


def _rows(parts: Sequence[Sequence[torch.Tensor]], pinned: bool = False) -> torch.Tensor:
    """Put tensors of bytes one after the other, those of each part in a row of their own."""
    size = max(sum(aligned(len(tensor)) for tensor in tensors) for tensors in parts)
    rows = torch.empty(len(parts), size, dtype=torch.uint8, pin_memory=pinned)
    for row, tensors in zip(rows, parts, strict=True):
        for tensor in tensors:
            row[: len(tensor)] = tensor
            row = row[aligned(len(tensor)) :]
    return rows


# The loader ----------------------------------------------------------------------------------------------------------


class _OtherFailed(RuntimeError):
    """The reader of another node has failed, and said so."""


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
            rounds = EndAhead(takewhile(lambda message: message.real != ENDED, self._messages(pending, start)))
            yield from self._hand_out_each(self._own_parts(rounds), rounds, start, place)
            return
        for batch in self._run(pending, place):
            if self.end_of_dataloader:
                self.remainder = batch_length(batch) or -1
            yield batch

    @property
    def _reads_ahead(self) -> bool:
        # Among several processes the next round is read, and on its way, while this one is computed.
        return self.state.num_processes > 1 or self.slice_fn is not None

    def _own_parts(self, rounds: EndAhead) -> Iterator[Any]:
        """This process's part of every round, while the next one is on its way."""
        index = self._layouts[self.state.process_index].shard_index
        for message in rounds:
            part, self._counts = message.batch()
            if rounds.ended and self._counts is None:
                self.remainder = message.real * len(self.readers)
            if self.slice_fn is not None:
                ranks = {"process_index": self.state.process_index, "num_processes": self.state.num_processes}
                part = self.slice_fn(part, slice(message.start(index), message.start(index + 1)), **ranks)
            yield part

    @functools.cached_property
    def _connection(self) -> BatchScatter:
        # gloo can move device tensors only by way of the host; so the bytes had better start there.
        communicator, ranks = comm.current(), self._served()
        on_host = self.state.backend == "gloo" or communicator.group is None
        device = CPU if on_host else self.state.device
        # A function of the user's cuts from the whole round, on every rank.
        places = None if self.slice_fn else [self._layouts[rank].shard_index % self._shards() for rank in ranks]
        groups = communicator.group, comm.side_group()
        if len(self.readers) > 1:
            groups = comm.group_of(ranks, on_host), comm.group_of(ranks, on_host=True)
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
            if simulated.current() is not None:
                raise ValueError(
                    f"Rank {self.state.process_index} is simulated, and would be sent its batches by rank {self._served()[0]}, which is made up. "
                    f"Simulate a rank that reads (--simulate_rank {self._served()[0]}), or set dispatch_batches=False."
                )
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
                self._exchange(FAILED)
            send(Round(f"{type(error).__name__}: {error}", real=FAILED))
            raise
        yield send(Round(None, real=ENDED))

    def _head(self) -> list[Any]:
        """Read the first round of the epoch, of which the beginning is left out, without a trace in any generator."""
        put_back, base, sampler = resume.kept(self), self.base_dataloader, self.get_sampler()
        if isinstance(sampler, ReplayableRandomSampler):
            sampler.replay = None  # drawn once more instead, like all that is drawn after it
        parts = {name: unskipped(getattr(base, name))[0] for name in ("sampler", "batch_sampler")}
        with generators.kept(self._progress.at_start):
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
            real = sum(map(_length, group)) if group else ENDED
            of_readers = self._exchange(real)
            if held is not None:
                # A sampler whose batches vary in size: no shard gets duplicates in the middle of an epoch.
                yield held if group and held.real >= shards else held.completed(head, shards, [held.real])
                held = None
            if ENDED in of_readers:
                if group:
                    logger.warning(
                        f"Rank {self.state.process_index} reads for its node and had at least one step more, which this epoch "
                        "leaves out: all processes stop when the first node has no more."
                    )
                return
            whole = Round.of(join(group), real, shards)
            if head is None:
                head = take(join(first) if first else whole.batch, 0, shards)
            if real % shards == 0 and all(each == real for each in of_readers):
                yield whole
            elif len(of_readers) == 1:
                held = whole
            else:
                yield whole.completed(head, shards, of_readers)

    def _exchange(self, real: int) -> list[int]:
        """The samples that each reader has for a round, or how it ended; where another one failed, this one does, too."""
        if len(self.readers) == 1:
            return [real]
        group = comm.group_of(self.readers, on_host=True)
        found = torch.zeros(len(self.readers), dtype=torch.int64)
        found[self.readers.index(self.state.process_index)] = real
        dist.all_reduce(found, group=group)
        failed = [rank for rank, each in zip(self.readers, found.tolist(), strict=True) if each == FAILED]
        if failed and real != FAILED:
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


def _length(batch: Any) -> int:
    length = batch_length(batch)
    if length is None:
        raise ValueError(
            f"A batch of type {type(batch).__name__} has no tensor or list with a first dimension of samples, so it "
            "cannot be divided among processes. Let the collate_fn return one, or use dispatch_batches=False."
        )
    for leaf in leaves(batch, is_column):
        # Tensors of another length are cut as upstream cuts them.
        if not isinstance(leaf, torch.Tensor) and samples_of(leaf) not in (None, length):
            raise ValueError(
                f"A batch of {length} samples has {len(leaf)} values in {leaf!r}, so it cannot be divided among processes. Let the collate_fn "
                "return tensors, or arrays or lists of one value a sample, or use dispatch_batches=False."
            )
    return length
