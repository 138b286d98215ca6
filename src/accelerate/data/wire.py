"""How the dispatcher sends batches: one broadcast per batch, as long as batches look alike.

A batch is taken apart into its tensors and a *structure*: the containers with a placeholder in the place of each
tensor. The structure travels as a pickled object and only when it changes. The tensors travel as bytes in one buffer
behind a header of integers, which both sides know the length of:

    kind, sequence number, last, real samples, part sizes..., payload bytes, for each tensor its shape

Both sides remember the payload size of the last batch and make the buffer that large; a payload that does not fit
follows in a second broadcast. So batches of equal shape cost one broadcast, others two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accelerate.data import pieces
from accelerate.data.pieces import Placeholder

BATCH, STRUCTURE, END, FAILURE = range(4)
WORD = 8
ALIGNMENT = 16
# Beyond this a payload always travels by itself: a second broadcast costs little then, and a buffer too large for the
# next batch would cost more.
LARGEST_SHARED_PAYLOAD = 1 << 20


@dataclass(frozen=True)
class Message:
    """A batch as it travels.

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


def take_apart(batch: Any, tensors: list[torch.Tensor]) -> Any:
    """Move the tensors of a batch into a list; returns the structure that is left."""
    if isinstance(batch, torch.Tensor):
        tensors.append(batch)
        return Placeholder(batch.dtype, batch.dim())
    if type(batch) is dict:
        return {key: take_apart(value, tensors) for key, value in batch.items()}
    if isinstance(batch, (Mapping, list, tuple)):
        items = pieces.children(batch)
        if items is not None:
            return pieces.rebuilt(batch, [take_apart(item, tensors) for item in items])
    return batch


def put_together(structure: Any, tensors: Any) -> Any:
    """Undo `take_apart`; `tensors` is an iterator."""
    if isinstance(structure, Placeholder):
        return next(tensors)
    items = pieces.children(structure)
    if items is None:
        return structure
    return pieces.rebuilt(structure, [put_together(item, tensors) for item in items])


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
    """Carries tensors and objects from one process to all others.

    Args:
        communicator: that of the processes; its process group carries the tensors.
        sender: rank of the process that sends.
    """

    def __init__(self, communicator: Any, sender: int = 0) -> None:
        self.communicator = communicator
        self.sender = sender

    def tensor(self, tensor: torch.Tensor) -> None:
        """Overwrite the tensor with the sender's, which has the same size everywhere.

        Not the communicator's own `broadcast`: that lets all ranks report what they send, to find disagreements. Here the
        sizes are settled by the message before, and the sequence numbers show when processes are out of step.
        """
        dist.broadcast(tensor, self.sender, group=self.communicator.group)

    def object(self, value: Any = None) -> Any:
        """Return the sender's object."""
        values = [value]
        self.communicator.broadcast_object_list(values, self.sender)
        return values[0]


class Wire:
    """One end of the connection between the process that reads and the processes that receive.

    All processes build it alike and use it in step: `send` or `fail` on the sender is one `receive` on the others.

    Args:
        transport: carries tensors and objects from the reading process to the others.
        shards: number of parts of a batch.
        device: where tensors have to be to travel.
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

    # Both sides -------------------------------------------------------------------------------------------------------

    def _header_words(self) -> int:
        return 5 + self.shards + sum(placeholder.dims for placeholder in self.placeholders)

    def _prepare_buffers(self) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The buffer on the device, the one on the CPU (the same if the device is the CPU), and the header's words."""
        if self._buffers is None:
            size = aligned(self._header_words() * WORD) + self.shared
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            staged = buffer
            if self._stages:
                staged = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            words = staged.numpy()[: self._header_words() * WORD].view("int64")
            self._buffers = buffer, staged, words
        return self._buffers

    def _use_structure(self, structure: Any) -> None:
        self.structure = structure
        self.placeholders = []
        _collect(structure, self.placeholders)
        self.shared = 0
        self._buffers = None

    def _remember(self, payload: int) -> None:
        shared = payload if payload <= LARGEST_SHARED_PAYLOAD else 0
        if shared != self.shared:
            self.shared = shared
            self._buffers = None

    # The sender -------------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a batch."""
        try:
            tensors: list[torch.Tensor] = []
            structure = take_apart(message.batch, tensors)
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

    # The receivers ----------------------------------------------------------------------------------------------------

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
            # The next message overwrites the buffer, so the batch takes it along and the wire gets a new one.
            room = buffer[len(buffer) - self.shared :]
            self._buffers = None
        tensors, offset = [], 0
        for placeholder in self.placeholders:
            shape, shapes = shapes[: placeholder.dims], shapes[placeholder.dims :]
            size = placeholder.dtype.itemsize
            for length in shape:
                size *= length
            tensors.append(room[offset : offset + size].view(placeholder.dtype).view(shape))
            offset += aligned(size)
        self._remember(payload)
        return Message(put_together(self.structure, iter(tensors)), real, sizes, bool(last))


class ObjectWire(Wire):
    """The same connection where tensors cannot travel as bytes: every batch is one pickled object."""

    def send(self, message: Message) -> None:
        """Send a batch."""
        self.transport.object((BATCH, message))

    def finish(self) -> None:
        """Say that there is no batch at all."""
        self.transport.object((END, None))

    def fail(self, error: BaseException) -> None:
        """Say that reading failed, so that the other processes stop too instead of waiting."""
        self.transport.object((FAILURE, f"{type(error).__name__}: {error}"))

    def receive(self) -> Message | None:
        """Wait for the next batch; None if there is none.

        Raises:
            RuntimeError: the sender failed.
        """
        kind, content = self.transport.object()
        if kind == FAILURE:
            raise RuntimeError(f"The dispatching process could not read its next batch: {content}")
        return content


def _collect(structure: Any, placeholders: list[Placeholder]) -> None:
    if isinstance(structure, Placeholder):
        placeholders.append(structure)
        return
    for item in pieces.children(structure) or ():
        _collect(item, placeholders)
