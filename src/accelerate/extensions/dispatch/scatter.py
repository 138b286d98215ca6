"""One rank sends each rank its part of a nested structure, while the ranks compute.

A message is a header of integers, over the host, and two rows of bytes for each rank. The description is the pickled part without its
tensors: it travels over the host, and only if it differs from the one before. The body is the bytes of the tensors, over the
group of the device. What fits into the room behind the header travels there, so a small batch costs one operation.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate.comm.base import Communicator

CPU = torch.device("cpu")
ALIGNMENT = 64
HEADER = ALIGNMENT  # bytes, for the sequence and the number of a message, and the sizes of its description and body
ROOM = 4 << 10  # bytes behind the header; they take less time than another operation

# What a rank gets of a message: the number in its header, and a function that waits for this rank's part.
Received = tuple[int, Callable[[], Any]]


def aligned(size: int) -> int:
    """Round up, so that every tensor in the body starts at a multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Pickler(pickle.Pickler):
    """Pickles a part without its tensors; of them it keeps dtype and shape."""

    def __init__(self, part: Any) -> None:
        file = io.BytesIO()
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.dump(part)
        self.description = file.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.is_nested and obj.layout == torch.strided:
            # torch's way ignores where in its memory a tensor begins, and tensors that arrive are parts of one body.
            return torch.nested.as_nested_tensor, (list(obj.unbind()),)
        return NotImplemented

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
        tensor, self.rest = self.rest[:size], self.rest[aligned(size) :]
        return tensor.view(dtype).view(shape)


class Scatter:
    """One end of the connection between rank 0, which sends, and the other ranks; all ranks use it in step.

    Args:
        communicator: communicator of the ranks.
        group: process group of the device; None without `torch.distributed` (torch_xla).
        host_group: process group of the host; None likewise.
        device: where bodies arrive.
        places: which part of a message each rank gets; None if every rank gets the only part.
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

    def send(self, number: int, parts: Sequence[Any]) -> Received:
        """Begin to send a number and the parts, one part to all if there is only one; return what rank 0 gets."""
        # Everything is laid out before anything is sent: the other ranks are sent the error of a part that cannot be pickled.
        parts = parts if len(parts) == self.parts else [*parts] * self.parts
        pickled = [_Pickler(part) for part in parts]
        body = _rows([pickler.tensors for pickler in pickled], pinned=self.device.type == "cuda")
        previous, self.descriptions = self.descriptions, [pickler.description for pickler in pickled]
        texts = _rows([[torch.frombuffer(bytearray(text), dtype=torch.uint8)] for text in self.descriptions])
        text_size = 0 if self.descriptions == previous else texts.shape[1]
        size, heads = body.shape[1], torch.zeros(self.parts, HEADER + ROOM, dtype=torch.uint8)
        heads.view(torch.int64)[:, :4] = torch.tensor([self.sequence, number, text_size, size])
        self.sequence += 1
        text_inside, inside = self._inside(text_size, size)
        heads[:, HEADER:][:, :text_inside] = texts[:, :text_inside]
        heads[:, HEADER + text_inside :][:, :inside] = body[:, :inside]
        shares = [
            (HEADER + ROOM, CPU, heads),
            (text_size - text_inside, CPU, texts),
            (size - inside, self.device, body),
        ]
        waits = [self._share(*share)[1] for share in shares]
        first = parts[0]
        return number, lambda: ([wait() for wait in waits], first)[1]

    def receive(self) -> Received:
        """Wait for the next header and begin to receive; RuntimeError if rank 0 is at another message."""
        head, wait = self._share(HEADER + ROOM, CPU)
        wait()
        sequence, number, text_size, size = head.view(torch.int64)[:4].tolist()
        if sequence != self.sequence:
            raise RuntimeError(
                f"This process waits for message {self.sequence} of the dispatching process, but {sequence} came: the "
                "processes are not in step. Leave the loop over a dispatched loader at the same batch on all of them."
            )
        self.sequence += 1
        text_inside, inside = self._inside(text_size, size)
        text, body = head[HEADER:][:text_inside], head[HEADER + text_inside :][:inside]
        if text_size and not text_inside:
            text, wait = self._share(text_size, CPU)
            wait()
        if text_size:
            self.descriptions = [text.numpy().tobytes()]
        if not inside:
            body, wait = self._share(size, self.device)
        [description] = self.descriptions
        return number, lambda: (wait(), _Unpickler(description, body).load())[1]

    def _inside(self, text_size: int, size: int) -> tuple[int, int]:
        """Return how many bytes of a description and of a body are behind the header: all of each, or none."""
        text_inside = text_size if text_size <= ROOM else 0
        return text_inside, size if self.device.type == "cpu" and text_inside + size <= ROOM else 0

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
        rows_of_ranks = None if rows is None else [rows[place] for place in self.places]
        return row, dist.scatter(row, rows_of_ranks, 0, group=group, async_op=True).wait


def _rows(parts: Sequence[Sequence[torch.Tensor]], pinned: bool = False) -> torch.Tensor:
    """Put tensors of bytes one after the other, those of each part in a separate row."""
    size = max(sum(aligned(len(tensor)) for tensor in tensors) for tensors in parts)
    rows = torch.empty(len(parts), size, dtype=torch.uint8, pin_memory=pinned)
    for row, tensors in zip(rows, parts, strict=True):
        for tensor in tensors:
            row[: len(tensor)] = tensor
            row = row[aligned(len(tensor)) :]
    return rows
