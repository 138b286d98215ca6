"""Batch broadcast: the process that reads sends each batch to the others, in one broadcast as long as batches look alike.

A batch is taken apart into its tensors and a *structure*: the containers with a placeholder in the place of each
tensor. The structure is sent as a pickled object and only when it changes. The tensors are sent as bytes in one buffer
behind a message header of integers, which both sides know the length of:

    kind, sequence number, last, real samples, part sizes..., payload bytes, for each tensor its shape

Both sides remember the payload size of the last batch and make the buffer that large; a payload that does not fit
follows in a second broadcast. So batches of equal shape cost one broadcast, others two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Batches: nested structures whose leaves have the samples along their first dimension. A leaf is a tensor, or a list without
# tensors inside (`default_collate` leaves strings as such a list), whose items are one sample each.


@dataclass(frozen=True)
class Placeholder:
    """Stands for a tensor in a batch that was taken apart.

    Args:
        dtype: element type of the tensor.
        dims: its number of dimensions; the sizes may differ from batch to batch.
    """

    dtype: torch.dtype
    dims: int


def is_column(value: Any) -> bool:
    """Whether a list or tuple holds plain values, one per sample."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields") or not value:
        return False
    return not any(isinstance(item, (torch.Tensor, Placeholder, Mapping, list, tuple)) for item in value)


def children(container: Any) -> list[Any] | None:
    """The items of a mapping, list or tuple; None for a leaf."""
    if isinstance(container, Mapping):
        return [container[key] for key in container]
    if isinstance(container, (list, tuple)) and not is_column(container):
        return list(container)
    return None


def over_leaves(function: Callable[..., Any], batch: Any, *others: Any) -> Any:
    """Apply `function` to the corresponding leaves of equally built batches; the containers are built anew."""
    if isinstance(batch, torch.Tensor):
        return function(batch, *others)
    if type(batch) is dict and not others:  # the common batch, spared the questions below
        return {key: over_leaves(function, value) for key, value in batch.items()}
    items = children(batch)
    if items is None:
        return function(batch, *others)
    columns = zip(items, *(children(other) for other in others), strict=True)
    items = [over_leaves(function, *leaves) for leaves in columns]
    if isinstance(batch, Mapping):
        return type(batch)(dict(zip(batch, items, strict=True)))
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)


def batch_length(batch: Any) -> int | None:
    """Number of samples in a batch, from its first leaf that has samples; None if there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    if is_column(batch):
        return len(batch)
    lengths = map(batch_length, children(batch) or ())
    return next((length for length in lengths if length is not None), None)


def take(batch: Any, start: int, stop: int) -> Any:
    """The samples from `start` to `stop`; leaves that hold no samples stay whole."""

    def part(leaf: Any) -> Any:
        has_samples = leaf.dim() > 0 if isinstance(leaf, torch.Tensor) else is_column(leaf)
        return leaf[start:stop] if has_samples else leaf

    return over_leaves(part, batch)


def join(batches: Sequence[Any]) -> Any:
    """Put batches one after the other; a leaf that holds no samples is taken from the first.

    Raises:
        ValueError: the batches are not built alike.
    """
    if len(batches) == 1:
        return batches[0]
    try:
        return over_leaves(_join_leaves, *batches)
    except (TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            "Batches cannot be joined for dispatching, because they differ in structure or in the shape of a sample "
            f"({error}). Let the collate_fn pad them to one shape, or use split_batches=True or dispatch_batches=False."
        ) from error


def _join_leaves(*leaves: Any) -> Any:
    first = leaves[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(leaves) if first.dim() else first
    if is_column(first):
        return type(first)(item for leaf in leaves for item in leaf)
    return first


def padded(batch: Any, length: int, head: Any, size: int) -> Any:
    """Lengthen a batch of `length` samples to `size` with the samples of `head`, over and over."""
    copies, rest = divmod(size - length, batch_length(head))
    return join([batch, *[head] * copies, *([take(head, 0, rest)] if rest else [])])


# Messages --------------------------------------------------------------------------------------------------------------

BATCH, STRUCTURE, END, FAILURE = range(4)
WORD = 8
ALIGNMENT = 16
# Beyond this a payload is always sent by itself: a second broadcast costs little then, and a buffer too large for the
# next batch would cost more.
LARGEST_SHARED_PAYLOAD = 1 << 20


@dataclass(frozen=True)
class Message:
    """A batch as it is sent.

    Args:
        batch: the samples of all shards, in the order of the shards.
        real: number of samples at the front that are not duplicates.
        sizes: number of samples for each shard.
        last: this is the last batch of the epoch.
    """

    batch: Any
    real: int
    sizes: tuple[int, ...]
    last: bool


def same(first: Any, second: Any) -> bool:
    """Whether two structures are equal, types included; values that cannot be compared count as different."""
    if type(first) is not type(second):
        return False
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, Mapping):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    try:
        return bool(first == second)
    except Exception:
        # Arrays and the like refuse to be a single truth value; sending the structure again is always right.
        return False


def aligned(size: int) -> int:
    """Round up, so that every tensor in the buffer starts where its dtype may."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Transport:
    """Carries tensors and objects from the main process to all others.

    Args:
        communicator: that of the processes; its process group carries the tensors.
    """

    def __init__(self, communicator: Any) -> None:
        self.communicator = communicator

    def tensor(self, tensor: torch.Tensor) -> None:
        """Overwrite the tensor with the main process's, which has the same size everywhere.

        Not the communicator's own `broadcast`: that lets all ranks report what they send, to find disagreements. Here the
        sizes are settled by the message before, and the sequence numbers show when processes are out of step.
        """
        if self.communicator.group is None:  # no torch.distributed: torch_xla
            tensor.copy_(self.object(tensor))
        else:
            dist.broadcast(tensor, 0, group=self.communicator.group)

    def object(self, value: Any = None) -> Any:
        """Return the main process's object."""
        values = [value]
        self.communicator.broadcast_object_list(values, 0)
        return values[0]


class BatchBroadcast:
    """One end of the connection between the process that reads and the processes that receive.

    All processes build it alike and use it in step: `send` or `fail` on the sender is one `receive` on the others.

    Args:
        transport: carries tensors and objects from the reading process to the others.
        shards: number of parts of a batch.
        device: where tensors have to be to be sent.
    """

    def __init__(self, transport: Transport, shards: int, device: torch.device) -> None:
        self.transport = transport
        self.shards = shards
        self.device = device
        self.structure: Any = None
        self.placeholders: list[Placeholder] = []
        self.shared = 0
        self.sequence = 0
        self._stages = device.type != "cpu"
        self._buffers: tuple[torch.Tensor, torch.Tensor, Any] | None = None

    # Both sides ------------------------------------------------------------------------------------------------------

    def _prepare_buffers(self) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The buffer on the device, the one on the CPU (the same if the device is the CPU), and the header's words."""
        if self._buffers is None:
            header = WORD * (5 + self.shards + sum(placeholder.dims for placeholder in self.placeholders))
            size = aligned(header) + self.shared
            buffer = staged = torch.empty(size, dtype=torch.uint8, device=self.device)
            if self._stages:
                staged = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self._buffers = buffer, staged, staged.numpy()[:header].view("int64")
        return self._buffers

    def _use_structure(self, structure: Any) -> None:
        self.structure, self.placeholders = structure, []
        self.shared, self._buffers = 0, None

        def note(leaf: Any) -> Any:
            if isinstance(leaf, Placeholder):
                self.placeholders.append(leaf)
            return leaf

        over_leaves(note, structure)

    def _remember(self, payload: int) -> None:
        shared = payload if payload <= LARGEST_SHARED_PAYLOAD else 0
        if shared != self.shared:
            self.shared, self._buffers = shared, None

    # The sender ------------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a batch."""
        tensors: list[torch.Tensor] = []

        def taken_out(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            tensors.append(leaf)
            return Placeholder(leaf.dtype, leaf.dim())

        try:
            structure = over_leaves(taken_out, message.batch)
            flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        except Exception as error:
            self.fail(error)
            raise
        if not same(structure, self.structure):
            self._send_words(STRUCTURE)
            self.transport.object(structure)
            self._use_structure(structure)
        payload = sum(aligned(len(part)) for part in flat)
        fits = payload <= self.shared
        staged = self._prepare_buffers()[1]
        room = staged[len(staged) - self.shared :] if fits else torch.empty(payload, dtype=torch.uint8)
        offset = 0
        for part in flat:
            room[offset : offset + len(part)].copy_(part)
            offset += aligned(len(part))
        shapes = [length for tensor in tensors for length in tensor.shape]
        self._send_words(BATCH, message.last, message.real, *message.sizes, payload, *shapes)
        if not fits:
            self.transport.tensor(room.to(self.device))
        self._remember(payload)

    def finish(self) -> None:
        """Say that there is no batch at all."""
        self._send_words(END)

    def fail(self, error: BaseException) -> None:
        """Say that reading failed, so that the other processes stop too instead of waiting."""
        self._send_words(FAILURE)
        self.transport.object(f"{type(error).__name__}: {error}")

    def _send_words(self, kind: int, *words: int) -> None:
        buffer, staged, header = self._prepare_buffers()
        header[: 2 + len(words)] = (kind, self.sequence, *words)
        self.sequence += 1
        if staged is not buffer:
            buffer.copy_(staged)
        self.transport.tensor(buffer)

    # The receivers ---------------------------------------------------------------------------------------------------

    def receive(self) -> Message | None:
        """Wait for the next batch; None if there is none.

        Raises:
            RuntimeError: the sender failed, or the processes are not in step.
        """
        while True:
            buffer, staged, header = self._prepare_buffers()
            self.transport.tensor(buffer)
            if staged is not buffer:
                # The payload stays on the device; only the header is read here.
                staged[: header.nbytes].copy_(buffer[: header.nbytes])
            kind, sequence, *words = header.tolist()
            if sequence != self.sequence:
                raise RuntimeError(
                    f"This process waits for message {self.sequence} of the dispatching process, but message {sequence} "
                    "arrived: the processes are not in step. Leave the loop over a dispatched loader at the same batch "
                    "on all processes."
                )
            self.sequence += 1
            if kind == BATCH:
                return self._unpack(buffer, words)
            if kind == END:
                return None
            received = self.transport.object()
            if kind == FAILURE:
                raise RuntimeError(f"The dispatching process could not read its next batch: {received}")
            self._use_structure(received)

    def _unpack(self, buffer: torch.Tensor, words: list[int]) -> Message:
        last, real, *words = words
        sizes, (payload, *shapes) = tuple(words[: self.shards]), words[self.shards :]
        if payload > self.shared:
            room = torch.empty(payload, dtype=torch.uint8, device=self.device)
            self.transport.tensor(room)
        else:
            # The next message overwrites the buffer, so the batch takes it along and the next message gets a new one.
            room, self._buffers = buffer[len(buffer) - self.shared :], None
        tensors, offset = [], 0
        for placeholder in self.placeholders:
            shape, shapes = shapes[: placeholder.dims], shapes[placeholder.dims :]
            size = placeholder.dtype.itemsize
            for length in shape:
                size *= length
            tensors.append(room[offset : offset + size].view(placeholder.dtype).view(shape))
            offset += aligned(size)
        self._remember(payload)
        arrived = iter(tensors)
        batch = over_leaves(lambda leaf: next(arrived) if isinstance(leaf, Placeholder) else leaf, self.structure)
        return Message(batch, real, sizes, bool(last))
