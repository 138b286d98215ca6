"""One collective for agreement and data: every message starts with what its sender is doing.

torch's collectives take equal sizes on trust. With gloo, unequal ones abort one rank and reset the other's connection
(`all_gather`), make one rank wait for half an hour (`all_reduce`) or pass unnoticed (`broadcast`); with NCCL they hang or
return garbage. A check before each call would cost a second round trip, as much again for small tensors. Checking only what
a rank has not seen yet does not work either: a rank with new shapes would wait for an answer from one that has seen its own
and sends data already.

So the check travels with the data. A message is a header (operation, structure, shapes, dtypes) plus `room` bytes of
payload, gathered by a single `all_gather` of bytes. Every rank computes the same `room`, because it depends only on what all
ranks agreed on before: the payload size that followed the last exchange when it happened before. Sizes are therefore equal
even where the shapes are not, every rank sees every header, and all ranks raise together. If a payload does not fit - new
shapes, or more than `LARGEST` bytes - the data follows in collectives of its own, after the headers were compared. In a
loop that means one collective per call, and one for several tensors.

On devices other than the processor, reading headers would make the host wait for the device. Where an exchange repeats, its
headers are copied in the background and compared before the next operation instead.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate.comm.check import DistributedOperationException, disagreement

WORDS = 32
HEADER = WORDS * 8
SMALLEST, LARGEST = 1024, 4 << 20
MEMORY = 1024

OPERATIONS = ("gather", "reduce", "broadcast", "pad_across_processes", "gather_object")
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.bool, torch.complex64, torch.complex128),
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, start=1)}


@dataclass(frozen=True)
class Letter:
    """What a rank is about to exchange.

    Args:
        key: operation, structure, and dtype and shape of each tensor; equal keys mean agreement.
        header: the same as bytes, as far as it fits.
        size: bytes of payload.
        inline: the most bytes that may travel with the header.
    """

    key: tuple[Any, ...]
    header: torch.Tensor
    size: int
    inline: int = LARGEST


def checksum(value: Any) -> int:
    """Return a number that is equal for equal values in every process (unlike `hash`)."""
    return zlib.crc32(repr(value).encode())


def write(operation: str, structure: Any, tensors: Sequence[torch.Tensor], inline: int = LARGEST) -> Letter:
    """Describe an exchange of tensors."""
    shapes = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
    words = [OPERATIONS.index(operation), checksum(structure), checksum(shapes), 0, len(tensors)]
    size = 0
    for tensor in tensors:
        size += tensor.numel() * tensor.element_size()
        words += [_CODES.get(tensor.dtype, 0), tensor.ndim, *tensor.shape]
    words[3] = size
    words = (words + [0] * WORDS)[:WORDS]
    header = torch.tensor(words, dtype=torch.int64).view(torch.uint8)
    return Letter((operation, structure, shapes), header, size, inline)


def _in_words(header: Sequence[int]) -> str:
    structure, count = header[1], header[4]
    tensors, at = [], 5
    while len(tensors) < count and at + 2 <= WORDS and at + 2 + header[at + 1] <= WORDS:
        code, ndim = header[at], header[at + 1]
        dtype = str(_DTYPES[code - 1]).removeprefix("torch.") if code else "other"
        tensors.append(f"{dtype}{list(header[at + 2 : at + 2 + ndim])}")
        at += 2 + ndim
    if len(tensors) < count:
        tensors.append(f"and {count - len(tensors)} more")
    suffix = f" (structure {structure:08x})" if structure != checksum(None) else ""
    return f"{', '.join(tensors)}{suffix}"


def differing(headers: torch.Tensor, operation: str) -> DistributedOperationException:
    """Return the error for headers, of shape (world size, `HEADER`), that differ; `operation` is this rank's."""
    rows = headers.contiguous().view(torch.int64).tolist()
    names = [OPERATIONS[row[0]] for row in rows]
    texts = [_in_words(row) for row in rows]
    if len(set(names)) > 1:
        texts = [f"`{name}` {text}".rstrip() for name, text in zip(names, texts, strict=True)]
    return disagreement(f"accelerate.utils.operations.{operation}", texts)


class Post:
    """Exchanges letters between the ranks of one process group and remembers which one follows which.

    Args:
        world_size: how many ranks there are.
        rank: which one this is.
        all_gather: gathers a vector of bytes from all ranks into one vector.
    """

    def __init__(self, world_size: int, rank: int, all_gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.world_size = world_size
        self.rank = rank
        self._all_gather = all_gather
        self._follows: dict[Any, tuple[Any, int]] = {}  # identical on all ranks: only agreed exchanges enter
        self._last: Any = None
        self._letters: dict[Any, Letter] = {}
        self._unread: tuple[Any, torch.Tensor, Letter, Any] | None = None

    def letter(self, operation: str, structure: Any, tensors: Sequence[torch.Tensor], inline: int) -> Letter:
        """Return the letter for an exchange; written once for each set of shapes."""
        key = (operation, structure, *[(tensor.dtype, tensor.shape) for tensor in tensors])
        letter = self._letters.get(key)
        if letter is None:
            if len(self._letters) >= MEMORY:
                self._letters.clear()
            letter = self._letters[key] = write(operation, structure, tensors, inline)
        return letter

    def room(self) -> int:
        """Return how many bytes of payload the next message carries; the same on all ranks."""
        expected = self._follows.get(self._last, (None, 0))[1]
        return max(SMALLEST, expected if expected <= LARGEST else 0)

    def agreed(self, key: Any, size: int) -> None:
        """Remember an exchange that all ranks took part in alike."""
        if len(self._follows) >= MEMORY:
            self._follows.clear()
        self._follows[self._last] = (key, size)
        self._last = key

    def exchange(self, letter: Letter, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
        """Send the header to all ranks, and the payload if there is room; raise on all ranks if they disagree.

        Args:
            letter: the description of `tensors`.
            tensors: contiguous, on `device`.
            device: where the bytes travel.

        Returns:
            The payloads of all ranks, a uint8 tensor of shape (world size, at least `letter.size`); None where they did
            not fit and have to be exchanged in another way now.

        Raises:
            DistributedOperationException: the ranks disagree.
        """
        self.settle()
        room = self.room()
        expected = self._follows.get(self._last, (None, 0))[0] == letter.key
        fits = letter.size <= min(room, letter.inline)
        parts = [letter.header if device.type == "cpu" else letter.header.to(device)]
        if fits:
            parts += [tensor.view(torch.uint8).reshape(-1) for tensor in tensors]
        blank = room - letter.size if fits else room
        if blank:
            parts.append(torch.zeros(blank, dtype=torch.uint8, device=device))
        message = torch.cat(parts)
        received = self._all_gather(message).view(self.world_size, message.numel())
        headers = received[:, :HEADER]
        if device.type == "cpu":
            self.compare(headers, letter)
        elif not (expected and fits and self._defer(headers, letter)):
            self.compare(headers.cpu(), letter)
        self.agreed(letter.key, letter.size if letter.size <= letter.inline else 0)
        return received[:, HEADER : HEADER + letter.size] if fits else None

    def compare(self, headers: torch.Tensor, letter: Letter) -> None:
        """Raise if a header differs from this rank's; every rank sees the same headers, so all raise or none does."""
        if bool((headers == letter.header).all()):
            return
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

    def settle(self) -> None:
        """Compare the headers of the last exchange, if that was not waited for."""
        if self._unread is None:
            return
        (event, headers, letter, before), self._unread = self._unread, None
        event.synchronize()
        after, self._last = self._last, before  # if the ranks disagreed, the others did not count the exchange
        self.compare(headers, letter)
        self._last = after
