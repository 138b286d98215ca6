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
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, pairwise, takewhile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from accelerate import comm
from accelerate.comm.base import Communicator
from accelerate.data import resume
from accelerate.data.adapter import CPU, DataLoaderAdapter, is_stateful, placer, variant
from accelerate.data.dividing import Divider, agreed_length, lengths
from accelerate.data.iterable import SizingCollate
from accelerate.data.loader import PreparedLoader
from accelerate.data.plan import ShardLayout
from accelerate.data.progress import Position
from accelerate.data.samplers import EndAhead, ReplayableRandomSampler, Rounds, unskipped
from accelerate.process import PartialState
from accelerate.runtime import generators

logger = logging.getLogger(__name__)

# Messages --------------------------------------------------------------------------------------------------------------

# In the place of a round's number of samples: there are no more rounds, or reading failed.
ENDED, FAILED = -1, -2
ALIGNMENT = 64


class Round(NamedTuple):
    """The samples of all shards in one step, `real` ones first: `width` for each shard, one less from shard `longer` on.

    `real` is `ENDED` or `FAILED` in a message without samples, and 0 if the number of samples is not known.

    Attributes:
        parts: what each shard gets, on the reader; or only one, which all of them get.
        counts: the real samples of each shard of all processes; None if all samples are real.
        batch: waits for this process's part, and returns it with `counts`; once the round is on its way.
    """

    parts: Sequence[Any]
    counts: tuple[int, ...] | None = None
    real: int = 0
    width: int = 0
    longer: int = 0
    batch: Callable[[], tuple[Any, tuple[int, ...] | None]] | None = None

    def start(self, shard: int) -> int:
        """Number of samples before a shard."""
        return _start(shard, self.width, self.longer)


def _start(shard: int, width: int, longer: int) -> int:
    return shard * width - max(0, shard - longer)


class Group(NamedTuple):
    """The batches that are read for one step, and the number of samples of each, 0 if it is not known."""

    batches: Sequence[Any]
    sizes: Sequence[int]

    @property
    def real(self) -> int:
        """Number of samples."""
        return sum(self.sizes)

    def round(self, divider: Divider, shards: int, whole: bool) -> Round:
        """Give each shard its unchanged batch, or divide all samples into shares that differ by one sample at most."""
        width, longer = -(-self.real // shards), self.real % shards or shards
        numbers = (None, self.real, width, longer)
        if whole:
            return Round(divider.divide(*self, [(0, self.real)]), *numbers)
        if len(self.batches) == shards and len(set(self.sizes)) == 1:
            return Round(self.batches, *numbers)
        return Round(divider.divide(*self, _bounds(shards, width, longer)), *numbers)

    def completed(self, head: Group, divider: Divider, shards: int, whole: bool) -> Round:
        """The same, filled with the samples of `head` until all shards have equally many."""
        rounds = Rounds(-(-self.real // shards), shards)
        counts = rounds.real(self.real)
        if rounds.total > self.real and head.real == 0:
            raise divider.refusal(
                "it has to be filled up, and batches of this epoch have an uncertain number of samples"
            )
        if rounds.total == self.real:
            return self.round(divider, shards, whole)._replace(counts=counts)
        copies = -(-(rounds.total - self.real) // head.real)
        batches, sizes = [*self.batches, *head.batches * copies], [*self.sizes, *head.sizes * copies]
        bounds = [(0, rounds.total)] if whole else _bounds(shards, rounds.size, shards)
        parts = divider.divide(batches, sizes, bounds, len(self.batches))
        return Round(parts, counts, self.real, rounds.size, shards)


def _bounds(shards: int, width: int, longer: int) -> list[tuple[int, int]]:
    return list(pairwise(_start(shard, width, longer) for shard in range(shards + 1)))


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
        # Sparse, nested and other special tensors pickle themselves, from tensors that come here.
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout != torch.strided or obj.is_nested:
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
    ) -> None:
        self.communicator, self.device, self.places = communicator, device, places
        self.parts = 1 if places is None else max(places) + 1
        self.group, self.host_group = group, host_group
        self.sequence, self.descriptions = 0, []

    def send(self, message: Round) -> Round:
        """Send a round, or what stands in its place; return what `receive` returns on the others."""
        # Everything is laid out before anything is sent: the others hear of what fails here.
        parts = message.parts if len(message.parts) == self.parts else [*message.parts] * self.parts
        described = [_Pickler((part, message.counts)) for part in parts]
        body = _rows([each.tensors for each in described], pinned=self.device.type == "cuda")
        before, self.descriptions = self.descriptions, [each.description for each in described]
        news = _rows([[torch.frombuffer(bytearray(text), dtype=torch.uint8)] for text in self.descriptions])
        size = 0 if self.descriptions == before else news.shape[1]
        self._on_host(torch.tensor([self.sequence, *message[2:5], size, body.shape[1]]))
        self.sequence += 1
        waits = [self._share(size, CPU, news)[1], self._share(body.shape[1], self.device, body)[1]]
        own = parts[0], message.counts
        return message._replace(parts=(), batch=lambda: ([wait() for wait in waits], own)[1])

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
        part = lambda: (wait(), _Unpickler(description, body).load())[1]  # noqa: E731
        message = Round((), None, *numbers, part)
        if message.real == FAILED:
            raise RuntimeError(f"The dispatching process could not read its next batch: {message.batch()[0]}")
        return message

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast a tensor of the host; return the reader's."""
        if self.host_group is None:  # no torch.distributed: torch_xla
            return self.communicator.broadcast_object_list([tensor], 0)[0]
        dist.broadcast(tensor, 0, group=self.host_group)
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
            return row, dist.broadcast(row, 0, group=group, async_op=True).wait
        each = None if rows is None else [rows[place] for place in self.places]
        return row, dist.scatter(row, each, 0, group=group, async_op=True).wait


def _rows(parts: Sequence[Sequence[torch.Tensor]], pinned: bool = False) -> torch.Tensor:
    """Put tensors of bytes one after the other, those of each part in a separate row."""
    size = max(sum(aligned(len(tensor)) for tensor in tensors) for tensors in parts)
    rows = torch.empty(len(parts), size, dtype=torch.uint8, pin_memory=pinned)
    for row, tensors in zip(rows, parts, strict=True):
        for tensor in tensors:
            row[: len(tensor)] = tensor
            row = row[aligned(len(tensor)) :]
    return rows


# The loader ----------------------------------------------------------------------------------------------------------


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
            start = self._left_out() if position is None else position.batches
            rounds = EndAhead(takewhile(lambda message: message.real != ENDED, self._messages(position, start)))
            yield from self._hand_out_each(self._own_parts(rounds), rounds, start, place)
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

    def _own_parts(self, rounds: EndAhead) -> Iterator[Any]:
        """This process's part of every round, while the next one is on its way."""
        index = self._layouts[self.state.process_index].shard_index
        for message in rounds:
            part, self._counts = message.batch()
            if rounds.ended and self._counts is None:
                self.remainder = message.real
            if self.slice_fn is not None:
                ranks = {"process_index": self.state.process_index, "num_processes": self.state.num_processes}
                part = self.slice_fn(part, slice(message.start(index), message.start(index + 1)), **ranks)
            yield part

    @functools.cached_property
    def _connection(self) -> BatchScatter:
        # gloo can move device tensors only by way of the host; so the bytes had better start there.
        communicator = comm.current()
        on_host = self.state.backend == "gloo" or communicator.group is None
        device = CPU if on_host else self.state.device
        # A function of the user's cuts from the whole round, on every rank.
        places = None if self.slice_fn else [layout.shard_index for layout in self._layouts]
        return BatchScatter(communicator, communicator.group, comm.side_group(), device, places)

    @property
    def _shards(self) -> int:
        return self._layouts[0].num_shards

    def _messages(self, position: Position | None, start: int) -> Iterator[Round]:
        """The rounds from `start` on: read and sent by rank 0, received by the others."""
        if self.state.process_index != 0:
            while True:
                yield self._connection.receive()
        alone = self.state.num_processes == 1
        send = _kept if alone else self._connection.send
        try:
            first = self._head() if start and self._shards > 1 and not self._drop_last else []
            batches = iter(self._epoch(position))
            for message in self._form_rounds(batches, self._shards, first):
                yield send(message)
        except Exception as error:
            send(Round([f"{type(error).__name__}: {error}"], real=FAILED))
            raise
        yield send(Round([None], real=ENDED))

    def _head(self) -> list[Any]:
        """Read the first round of the epoch, of which the beginning is omitted, without a trace in any generator."""
        put_back, base, sampler = resume.kept(self), self.base_dataloader, self.get_sampler()
        if isinstance(sampler, ReplayableRandomSampler):
            sampler.replay = None  # drawn once more instead, like all that is drawn after it
        parts = {name: unskipped(getattr(base, name))[0] for name in ("sampler", "batch_sampler")}
        with generators.kept(self._progress.start.generators):
            whole = variant(base, **parts, **({"next_iter_state": None} if is_stateful(base) else {}))
            head = list(islice(iter(whole), self._reads_per_step()))
        put_back()
        return head

    def _form_rounds(self, batches: Iterator[Any], shards: int, first: Sequence[Any] = ()) -> Iterator[Round]:
        """Form rounds of the batches read; `first` are those of the epoch's first round.

        The division of a round that the shards cannot share equally depends on whether it is the last.
        """
        per_round, whole = self._reads_per_step(), self.slice_fn is not None
        groups: Iterator[list[Any]] = iter(lambda: list(islice(batches, per_round)), [])
        if self._drop_last:
            groups = (group for group in groups if len(group) == per_round)
        divider, held = self._divider(), None
        head = self._group(divider, first, shards) if first else None
        for reads in chain(groups, [()]):
            group = self._group(divider, reads, shards) if reads else None
            if held is not None:
                # A sampler whose batches vary in size: no shard gets duplicates in the middle of an epoch.
                middle = group is not None and held.real >= shards
                yield (held.round(divider, shards, whole) if middle else held.completed(head, divider, shards, whole))
                held = None
            if group is None:
                return
            if head is None:
                head = group
            divider.witness = (head.batches[0], head.sizes[0]) if head.real else None
            if group.real == 0 and len(group.batches) == shards and not whole:
                yield Round(group.batches)
            elif group.real % shards == 0:
                yield group.round(divider, shards, whole)
            else:
                held = group

    def _group(self, divider: Divider, reads: Sequence[Any], shards: int) -> Group:
        """Count the samples of the batches of a step; ValueError if they are not known and the step has to be divided."""
        counted = isinstance(self.base_dataloader.collate_fn, SizingCollate)
        batches, samples = zip(*reads, strict=True) if counted else (reads, [None] * len(reads))
        if self.slice_fn is not None:
            sizes = [
                _first_length(batch) if size is None else size for batch, size in zip(batches, samples, strict=True)
            ]
            return Group(batches, sizes)
        full = len(batches) == shards
        if full and not counted:
            samples = [agreed_length(batch) for batch in batches]
            if None in samples:
                return Group(batches, [0] * shards)
        if not full or len(set(samples)) > 1:
            samples = [divider.size(batch, size) for batch, size in zip(batches, samples, strict=True)]
        return Group(batches, samples)

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


def _kept(message: Round) -> Round:
    return message._replace(batch=lambda: (message.parts[0], message.counts))


def _first_length(batch: Any) -> int:
    length = next((length for _, length in lengths(batch, lambda value: False)), None)
    if length is None:
        raise ValueError(
            f"slice_fn_for_dispatch cannot divide a {type(batch).__name__} without a tensor, array or list: it has no samples. Let "
            "the collate_fn return one, or use dispatch_batches=False."
        )
    return length
