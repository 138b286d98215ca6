"""Batch broadcast: the process that reads sends each batch to the others, in one broadcast as long as batches look alike.

A message is a header of integers (sequence number, bytes of the pickle, bytes of the body) and a body: the pickled batch
without its tensors, then their bytes. Both sides make the buffer as large as the last body; one that does not fit follows
in a second broadcast. So batches of equal shape cost one broadcast, others two.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from accelerate.comm.base import Communicator
from accelerate.comm.nested import honor_type, like_mapping

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


def over_leaves(function: Callable[..., Any], batch: Any, *others: Any) -> Any:
    """Apply `function` to the corresponding leaves of equally built batches; the containers are built anew."""
    if type(batch) is dict and not others:  # the common batch, spared the questions below
        return {key: over_leaves(function, value) for key, value in batch.items()}
    if isinstance(batch, torch.Tensor) or not is_nested(batch):
        return function(batch, *others)
    if not isinstance(batch, Mapping):
        return honor_type(batch, [over_leaves(function, *leaves) for leaves in zip(batch, *others, strict=True)])
    if any(other.keys() != batch.keys() for other in others):
        raise ValueError(f"the keys of the first are {list(batch)}")
    all_of = (batch, *others)
    return like_mapping(batch, {key: over_leaves(function, *(each[key] for each in all_of)) for key in batch})


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
    return over_leaves(lambda leaf: leaf if samples_of(leaf) is None else leaf[start:stop], batch)


def join(batches: Sequence[Any]) -> Any:
    """Put batches one after the other; leaves without samples are the first's. ValueError if they are not alike."""
    if len(batches) == 1:
        return batches[0]
    try:
        return over_leaves(_join_leaves, *batches)
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

HEADER = struct.Struct("3q40x")  # the body behind it begins where any dtype may
ALIGNMENT = 64
# Beyond this a body is always sent by itself: a second broadcast costs little then, and a buffer too large for the next
# batch would cost more.
LARGEST_SHARED_BODY = 1 << 20


class Message(NamedTuple):
    """A batch as it is sent: samples of all shards in order, real ones first, and the size of each shard."""

    batch: Any
    real: int
    sizes: tuple[int, ...]
    last: bool


def aligned(size: int) -> int:
    """Round up, so that every tensor in the body starts where its dtype may, and small changes of size fit."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Pickler(pickle.Pickler):
    """Takes the tensors out of what it pickles, and leaves their dtype and shape."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.parts: list[np.ndarray] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        self.parts.append(obj.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
        return obj.dtype, tuple(obj.shape)


class _Unpickler(pickle.Unpickler):
    """Puts tensors back, which share the memory of the body."""

    def __init__(self, file: io.BytesIO, body: torch.Tensor) -> None:
        super().__init__(file)
        self.rest = body

    def persistent_load(self, pid: Any) -> torch.Tensor:
        dtype, shape = pid
        size = dtype.itemsize * math.prod(shape)
        part, self.rest = self.rest[:size], self.rest[aligned(size) :]
        return part.view(dtype).view(shape)


class BatchBroadcast:
    """One end of the connection between the process that reads and the others; all use it in step."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self.communicator = communicator
        self.device = device
        self.shared = 0
        self.sequence = 0

    def send(self, value: Message | str | None) -> None:
        """Send a batch, or what ends an epoch in its place: why reading failed, or None if there is no batch at all."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(value)
        described, offset = file.tell(), aligned(file.tell())
        size = offset + sum(aligned(len(part)) for part in pickler.parts)
        fits = size <= self.shared
        buffer = self._on_host(HEADER.size + self.shared)
        body = buffer[HEADER.size :] if fits else self._on_host(size)
        HEADER.pack_into(buffer.numpy(), 0, self.sequence, described, size)
        content = memoryview(body.numpy())
        content[:described] = file.getbuffer()
        for part in pickler.parts:
            content[offset : offset + len(part)] = part
            offset += aligned(len(part))
        self._broadcast(buffer.to(self.device))
        if not fits:
            self._broadcast(body.to(self.device))
        self._next(size)

    def receive(self) -> Message | None:
        """Wait for the next batch; None if there is none. RuntimeError if the sender failed or is ahead."""
        buffer = self._broadcast(torch.empty(HEADER.size + self.shared, dtype=torch.uint8, device=self.device))
        sequence, described, size = HEADER.unpack_from(buffer[: HEADER.size].cpu().numpy())
        if sequence != self.sequence:
            raise RuntimeError(
                f"This process waits for message {self.sequence} of the dispatching process, but {sequence} arrived: the "
                "processes are not in step. Leave the loop over a dispatched loader at the same batch on all of them."
            )
        body = buffer[HEADER.size :]
        if size > self.shared:
            body = self._broadcast(torch.empty(size, dtype=torch.uint8, device=self.device))
        self._next(size)
        description = io.BytesIO(body[:described].cpu().numpy().tobytes())
        value = _Unpickler(description, body[aligned(described) :]).load()
        if isinstance(value, str):
            raise RuntimeError(f"The dispatching process could not read its next batch: {value}")
        return value

    def _on_host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite the tensor with the main process's, of the same size everywhere; return it."""
        if self.communicator.group is not None:
            dist.broadcast(tensor, 0, group=self.communicator.group)
            return tensor
        values = [tensor]  # no torch.distributed: torch_xla
        self.communicator.broadcast_object_list(values, 0)
        return tensor.copy_(values[0])

    def _next(self, size: int) -> None:
        self.shared = size if size <= LARGEST_SHARED_BODY else 0
        self.sequence += 1
