"""Batch scatter: the process that reads sends each rank its own part of a round of batches.

A message is a header of integers, over the host, and what belongs to each rank: a description, which is the pickled part
without its tensors, over the host, and only where it is not the one before; and a body, the bytes of the tensors, over the
group of the device. The body is on its way while the ranks compute.
"""

from __future__ import annotations

import io
import math
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accelerate.comm.base import Communicator
from accelerate.utils.nested import over_leaves

# Batches: nested structures whose leaves have the samples along their first dimension. A leaf is a tensor, or a list without
# tensors inside (`default_collate` leaves strings as such a list), whose items are one sample each.


def is_column(value: Any) -> bool:
    """Whether a list or tuple holds plain values, one per sample."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields") or not value:
        return False
    return not any(isinstance(item, (torch.Tensor, Mapping, list, tuple)) for item in value)


def is_nested(value: Any) -> bool:
    """Whether a value holds leaves, instead of being one."""
    return isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and not is_column(value))


def samples_of(leaf: Any) -> int | None:
    """Number of samples in a leaf; None if it belongs to the batch as a whole."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape[0] if leaf.dim() else None
    return len(leaf) if is_column(leaf) else None


def batch_length(batch: Any) -> int | None:
    """Number of samples in a batch, from its first leaf that has samples; None if there is none."""
    if isinstance(batch, torch.Tensor) or not is_nested(batch):
        return samples_of(batch)
    lengths = map(batch_length, batch.values() if isinstance(batch, Mapping) else batch)
    return next((length for length in lengths if length is not None), None)


def take(batch: Any, start: int, stop: int) -> Any:
    """The samples from `start` to `stop`; leaves that hold no samples stay whole."""
    return over_leaves(lambda leaf: leaf if samples_of(leaf) is None else leaf[start:stop], batch, is_leaf=is_column)


def join(batches: Sequence[Any]) -> Any:
    """Put batches one after the other; leaves without samples are the first's. ValueError if they are not alike."""
    if len(batches) == 1:
        return batches[0]
    try:
        return over_leaves(_join_leaves, *batches, is_leaf=is_column)
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            "Batches cannot be joined for dispatching, because they differ in structure or in the shape of a sample "
            f"({error}). Let the collate_fn pad them to one shape, or use split_batches=True or dispatch_batches=False."
        ) from error


def _join_leaves(*leaves: Any) -> Any:
    first = leaves[0]
    if samples_of(first) is None:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(leaves)
    return type(first)(item for leaf in leaves for item in leaf)


def padded(batch: Any, length: int, head: Any, size: int) -> Any:
    """Lengthen a batch of `length` samples to `size` with the samples of `head`, over and over."""
    copies, rest = divmod(size - length, batch_length(head))
    return join([batch, *[head] * copies, *([take(head, 0, rest)] if rest else [])])


# Messages --------------------------------------------------------------------------------------------------------------

# What a header announces: a round; why reading failed; no more rounds.
ROUND, FAILED, END = range(3)
ALIGNMENT = 64
CPU = torch.device("cpu")

_subgroups: weakref.WeakKeyDictionary[Communicator, dict[Any, Any]] = weakref.WeakKeyDictionary()


class Round(NamedTuple):
    """The samples of all shards in one step, `real` ones first: `width` for each shard, one less from shard `longer` on.

    Of a round on its way, `batch` is a function that waits for this process's part, and for `counts`: the real samples of each
    shard of all processes, if not all are.
    """

    batch: Any
    counts: tuple[int, ...] | None = None
    real: int = 0
    width: int = 0
    longer: int = 0
    kind: int = ROUND

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
        # Everything is laid out before anything is sent: what fails here is told to the others.
        starts = [message.start(part) for part in range(self.parts + 1)]
        whole = self.places is None or message.kind != ROUND
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
        sequence, *numbers, news, size = self._on_host(torch.empty(7, dtype=torch.int64)).tolist()
        if sequence != self.sequence:
            raise RuntimeError(
                f"This process waits for message {self.sequence} of the dispatching process, but {sequence} arrived: the "
                "processes are not in step. Leave the loop over a dispatched loader at the same batch on all of them."
            )
        self.sequence += 1
        if news:
            row, wait = self._share(news, CPU)
            wait()
            self.descriptions = [row.numpy().tobytes()]
        [description], (body, wait) = self.descriptions, self._share(size, self.device)
        message = Round(lambda: (wait(), _Unpickler(description, body).load())[1], None, *numbers)
        if message.kind == FAILED:
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


def subgroup(communicator: Communicator, ranks: Sequence[int], on_host: bool) -> Any:
    """The process group of some ranks, for device or host memory, made once. Those ranks, in one order."""
    made = _subgroups.setdefault(communicator, {})
    key = (*ranks, on_host)
    if key not in made:
        made[key] = dist.new_group(list(ranks), backend="gloo" if on_host else None, use_local_synchronization=True)
    return made[key]
