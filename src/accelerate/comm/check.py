"""Do all ranks call the same operation, on the same structure, shapes and dtypes? The header of every message says so.

torch's collectives take equal sizes on trust: unequal ones hang, abort, return garbage or pass unnoticed. A check before
each call would cost a second round trip, so the check travels with the data. A message is a header plus `room` bytes of
payload, gathered by a single `all_gather` of bytes. Every rank computes the same `room` from what all ranks exchanged
alike before, so sizes are equal even where shapes are not; every rank sees every header, and all ranks raise together.
What does not fit follows in collectives of its own, after the headers were compared; so a loop arrives at one collective
per call, also for several tensors.

Where a large gather is expected, its data is gathered beside the headers, straight from the tensors; a rank that is doing
something else contributes bytes without meaning. On devices other than the processor the headers of a repeated exchange
are copied in the background and compared before the next operation. Debug mode compares more, before each: `verify`.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from accelerate.comm.base import Communicator
from accelerate.comm.nested import leaves

WORDS = 32
HEADER = WORDS * 8
SMALLEST, LARGEST = 1024, 4 << 20  # bytes of payload that a message has room for
GATHER_INLINE = 256 << 10  # from here on, copying takes longer than a collective of its own
MEMORY = 1024  # exchanges remembered
KEPT = 1 << 20  # bytes of buffers that an exchange may keep for the next time

OPERATIONS = ("gather", "reduce", "broadcast", "pad_across_processes", "gather_object")
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.bool, torch.complex64, torch.complex128),
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, start=1)}


class DistributedOperationException(Exception):
    """The ranks call an operation differently: its kind, or the structure, shapes or dtypes of what it is given.

    All ranks raise it, so that the run ends at once instead of hanging.
    """


DistributedOperationException.__module__ = "accelerate.utils.operations"


def disagreement(operation: str, passed: Sequence[str]) -> DistributedOperationException:
    """Return the error for ranks that disagree; `passed` has what each rank passed, in words."""
    common = max(set(passed), key=lambda text: (passed.count(text), -passed.index(text)))
    different = [str(rank) for rank, text in enumerate(passed) if text != common]
    lines = "\n".join(f"  - Process {rank}: {text}" for rank, text in enumerate(passed))
    return DistributedOperationException(
        f"The processes disagree about a distributed operation: process(es) {', '.join(different)} differ from the others. "
        "All must pass the same structure, shapes and dtypes; `accelerator.pad_across_processes` makes shapes equal.\n\n"
        f"Operation: `{operation}`\nInput shapes:\n{lines}"
    )


def describe(data: Any, sizes: bool = True) -> str:
    """Return structure, shapes, dtypes and devices in words; without `sizes`, not what padding makes equal."""
    if isinstance(data, torch.Tensor):
        dtype = str(data.dtype).removeprefix("torch.")
        return f"{dtype}{list(data.shape)} on {data.device.type}" if sizes else f"{dtype} of {data.ndim} dimensions"
    if isinstance(data, dict) or hasattr(data, "items"):
        return "{" + ", ".join(f"{key!r}: {describe(value, sizes)}" for key, value in data.items()) + "}"
    if isinstance(data, (list, tuple)):
        inner = ", ".join(describe(value, sizes) for value in data)
        return f"[{inner}]" if isinstance(data, list) else f"({inner})"
    return type(data).__name__


def verify(communicator: Communicator, operation: str, data: Any, device: torch.device | None = None) -> None:
    """Compare what all ranks are about to pass to an operation: DistributedOperationException on all, or nothing."""
    pads = operation.rpartition(".")[2] == "pad_across_processes"
    kinds = {leaf.device.type for leaf in leaves(data) if isinstance(leaf, torch.Tensor)}
    stray = sorted(kinds - {device.type}) if device is not None else []
    key = describe(data, sizes=not pads)
    passed = communicator.gather_object((operation, key, describe(data), stray))
    strays = {rank: entry[3] for rank, entry in enumerate(passed) if entry[3]}
    if strays:
        where = "; ".join(f"process {rank}: {', '.join(kinds)}" for rank, kinds in strays.items())
        raise DistributedOperationException(
            f"`{operation}` was given tensors that are not on the device type {device.type!r} of this run ({where}). Move "
            "them there first, with `tensor.to(accelerator.device)`."
        )
    if any(entry[:2] != passed[0][:2] for entry in passed):
        names = {entry[0] for entry in passed}
        texts = [entry[2] if len(names) == 1 else f"`{entry[0]}` of {entry[2]}" for entry in passed]
        raise disagreement(operation, texts)


# -- the header of a message


class Plan(NamedTuple):
    """Buffers of an exchange, and views of this (`sent`) and all ranks' tensors in them; empty if they do not fit."""

    message: torch.Tensor
    received: torch.Tensor
    headers: torch.Tensor
    expected: torch.Tensor
    sent: list[torch.Tensor]
    views: list[torch.Tensor]


@dataclass
class Letter:
    """What a rank is about to exchange: equal keys mean agreement; at most `inline` bytes go with the header."""

    key: tuple[Any, ...]
    header: torch.Tensor
    size: int
    inline: float
    plans: dict[Any, Plan] = field(default_factory=dict)


class Outcome(NamedTuple):
    """Every rank's tensors: as views, valid until the next exchange, or gathered; None if still to be exchanged."""

    views: list[torch.Tensor] | None = None
    gathered: list[torch.Tensor] | None = None


def checksum(value: Any) -> int:
    """Return a number that is equal for equal values in every process (unlike `hash`)."""
    return zlib.crc32(repr(value).encode())


def _aligned(size: int) -> int:
    return (size + 15) & ~15


def _bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def header(words: list[int]) -> torch.Tensor:
    """Return a header: operation, checksums of structure and shapes, bytes, number of tensors, then their shapes."""
    return torch.tensor((words + [0] * WORDS)[:WORDS], dtype=torch.int64).view(torch.uint8)


def _in_words(header: Sequence[int]) -> str:
    count = header[4]
    tensors, at = [], 5
    while len(tensors) < count and at + 2 <= WORDS and at + 2 + header[at + 1] <= WORDS:
        code, ndim = header[at], header[at + 1]
        dtype = str(_DTYPES[code - 1]).removeprefix("torch.") if code else "other"
        tensors.append(f"{dtype}{list(header[at + 2 : at + 2 + ndim])}")
        at += 2 + ndim
    if len(tensors) < count:
        tensors.append(f"and {count - len(tensors)} more (checksum of all shapes {header[2]:08x})")
    return ", ".join(tensors)


def differing(headers: torch.Tensor, operation: str) -> DistributedOperationException:
    """Return the error for headers, of shape (world size, `HEADER`), that differ; `operation` is this rank's."""
    rows = headers.contiguous().view(torch.int64).tolist()
    # A message of another library's collective (a wrapper's gradients, say) has other numbers where ours has its header.
    ours = [0 <= row[0] < len(OPERATIONS) and min(row[1:5]) >= 0 and max(row[1:3]) < 2**32 for row in rows]
    names = [OPERATIONS[row[0]] if known else "another collective" for row, known in zip(rows, ours, strict=True)]
    texts = [_in_words(row) if known else "" for row, known in zip(rows, ours, strict=True)]
    if len(set(names)) > 1:
        texts = [f"`{name}` {text}".rstrip() for name, text in zip(names, texts, strict=True)]
    elif len({row[1] for row in rows}) > 1:  # such as other keys, another reduction, another source
        texts = [f"{text} (structure and arguments {row[1]:08x})" for text, row in zip(texts, rows, strict=True)]
    return disagreement(f"accelerate.utils.operations.{operation}", texts)


class Post:
    """Exchanges letters between the ranks of one process group and remembers which one follows which."""

    def __init__(self, world_size: int, gather_into: Callable[..., Callable[[], Any] | None]) -> None:
        self.world_size = world_size
        self._gather_into = gather_into
        # Identical on all ranks, because only exchanges alike on all ranks enter.
        self._follows: dict[Any, tuple[Any, int]] = {}
        self._last: Any = None
        self._letters: dict[Any, Letter] = {}
        self._unread: tuple[Any, torch.Tensor, Letter, Any] | None = None

    def letter(self, operation: str, structure: Any, tensors: Sequence[torch.Tensor], inline: float) -> Letter:
        """Return the letter for an exchange; written once for each set of shapes."""
        key = (operation, structure, *[(tensor.dtype, tensor.shape) for tensor in tensors])
        letter = self._letters.get(key)
        if letter is None:
            if len(self._letters) >= MEMORY:
                self._letters.clear()
            shapes = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
            words = [OPERATIONS.index(operation), checksum(structure), checksum(shapes), 0, len(tensors)]
            for dtype, shape in shapes:
                words[3] += _aligned(_bytes(dtype, shape))
                words += [_CODES.get(dtype, 0), len(shape), *shape]
            letter = self._letters[key] = Letter((operation, structure, shapes), header(words), words[3], inline)
        return letter

    def release(self) -> None:
        """Drop letters and their buffers, which are made again; which one follows which is the same on all ranks, and stays."""
        self._letters.clear()

    def _expected(self) -> tuple[Any, int]:
        return self._follows.get(self._last, (None, 0))

    def room(self) -> int:
        """Return how many bytes of payload the next message carries; the same on all ranks."""
        return max(SMALLEST, _aligned(self._expected()[1]))

    def remember(self, key: Any, size: int) -> None:
        """Remember an exchange that all ranks took part in alike, and how many bytes travelled with its header."""
        if len(self._follows) >= MEMORY:
            self._follows.clear()
        self._follows[self._last] = (key, size)
        self._last = key

    def transfer(
        self, output: torch.Tensor, message: torch.Tensor, tensors: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor] | None:
        """Gather a message from all ranks; if all expect a large gather, gather that data beside it."""
        key, size = self._expected()
        ahead = key[2] if size == 0 and key is not None and key[0] == "gather" else None
        if not ahead:
            self._gather_into(output, message)
            return None
        wait = self._gather_into(output, message, True)
        blank = (torch.zeros(shape, dtype=dtype, device=message.device) for dtype, shape in ahead)
        results = [self.gather_large(tensor.contiguous()) for tensor in (blank if tensors is None else tensors)]
        wait()
        return results if tensors is not None else None

    def gather_large(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather a contiguous tensor from all ranks without a header."""
        # As bytes: not every backend knows every dtype, and to a gather they are the same.
        output = tensor.new_empty((self.world_size * tensor.shape[0], *tensor.shape[1:]))
        self._gather_into(output.view(torch.uint8).reshape(-1), tensor.view(torch.uint8).reshape(-1))
        return output

    def exchange(self, letter: Letter, tensors: Sequence[torch.Tensor], device: torch.device) -> Outcome:
        """Send the header to all ranks, and the payload if it fits; all ranks raise if they disagree."""
        self.compare_last()
        room = self.room()
        known = self._expected()[0] == letter.key
        plan = letter.plans.get((room, device)) or self._plan(letter, room, device)
        for slot, tensor in zip(plan.sent, tensors, strict=False):
            slot.copy_(tensor)
        fits = letter.size <= min(room, letter.inline)
        ahead = [tensor.to(device) for tensor in tensors] if known and not fits else None
        gathered = self.transfer(plan.received.view(-1), plan.message, ahead)
        if device.type == "cpu":
            if not torch.equal(plan.headers, plan.expected):
                raise differing(plan.headers, letter.key[0])
        elif not (known and (fits or gathered is not None) and self._defer(plan.headers, letter)):
            self._compare(plan.headers.cpu(), letter)
        self.remember(letter.key, letter.size if letter.size <= letter.inline else 0)
        return Outcome(plan.views if fits else None, gathered)

    def _plan(self, letter: Letter, room: int, device: torch.device) -> Plan:
        fits = letter.size <= min(room, letter.inline)
        message = torch.zeros(HEADER + room, dtype=torch.uint8, device=device)
        message[:HEADER] = letter.header.to(device)
        received = torch.empty((self.world_size, HEADER + room), dtype=torch.uint8, device=device)
        sent, views, at = [], [], HEADER
        for dtype, shape in letter.key[2] if fits else ():
            size = _bytes(dtype, shape)
            sent.append(message[at : at + size].view(dtype).view(shape))
            views.append(received[:, at : at + size].view(dtype).unflatten(1, shape))
            at += _aligned(size)
        expected = letter.header.expand(self.world_size, HEADER).contiguous()
        plan = Plan(message, received, received[:, :HEADER], expected, sent, views)
        if received.numel() <= KEPT:
            if len(letter.plans) >= 4:
                letter.plans.clear()
            letter.plans[room, device] = plan
        return plan

    def _compare(self, headers: torch.Tensor, letter: Letter) -> None:
        """Raise if a header differs from this rank's; every rank sees the same headers, so all raise or none does."""
        if not bool((headers == letter.header).all()):
            raise differing(headers, letter.key[0])

    def _defer(self, headers: torch.Tensor, letter: Letter) -> bool:
        """Copy headers to the host without waiting; say whether that worked."""
        module = getattr(torch, headers.device.type, None)
        if not hasattr(module, "Event"):
            return False
        copy = torch.empty(headers.shape, dtype=torch.uint8, pin_memory=True)
        copy.copy_(headers, non_blocking=True)
        event = module.Event()
        event.record()
        self._unread = event, copy, letter, self._last
        return True

    def compare_last(self) -> None:
        """Compare the headers of the last exchange, if that was not waited for."""
        if self._unread is None:
            return
        (event, headers, letter, before), self._unread = self._unread, None
        event.synchronize()
        after, self._last = self._last, before  # if the ranks disagreed, the others did not count the exchange
        self._compare(headers, letter)
        self._last = after
