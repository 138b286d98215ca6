"""The permutation that `torch.randperm` draws, number by number as an epoch needs them.

torch shuffles forward: step i takes the next 32 bits of the generator, modulo what is left, and swaps position i with the one
so far behind it. So position i is final after step i, and the first batches of a large epoch need the first steps only.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

# Shorter ones are drawn whole, within a second: then a batch costs the same for any number of ranks. From the second
# number on torch draws 64 bits for a step.
SHORTEST, _LONGEST = 1 << 25, (2**32 - 1) // 20
# Few steps of a block meet at one position, and what a block touches fits into the processor's cache.
BLOCK = 1 << 14


class GrowingPermutation:
    """`torch.randperm(length, generator=generator)`, bit for bit; the generator has its state after that from the start.

    Attributes:
        indices: the numbers, of which `grow` says how many are final.
        block: steps that are made at a time, an even number.
    """

    def __init__(self, length: int, generator: torch.Generator, block: int = BLOCK) -> None:
        self.block, self._final, self._generator = block, 0, generator.clone_state()
        advance(length, generator)
        # A final position holds its number. Any other holds how far its number is from the position: zeros, whose memory the
        # system provides where it is touched first. Not numpy's, which asks for huge pages: the first block touches all of those.
        self.indices = torch.zeros(length, dtype=torch.int32)
        self._numbers = self.indices.numpy()

    def grow(self, stop: int) -> int:
        """Make the numbers before position `stop` final, in whole blocks; return how many are."""
        while self._final < min(stop, len(self._numbers)):
            self._shuffle(self._final, min(self._final + self.block, len(self._numbers)))
        return self._final

    def _shuffle(self, start: int, stop: int) -> None:
        numbers, places = self._numbers, np.arange(start, stop, dtype=np.int32)
        left = (len(numbers) - places).view(np.uint32)
        ends = (self._draws(stop - start, stop == len(numbers)) % left).view(np.int32) + places
        targets = ends.astype(np.intp)  # what numpy indexes with: converted once
        # No place is out of bounds; "clip" saves the search for one.
        taken, own = numbers.take(targets, mode="clip") + ends, numbers[start:stop] + places
        # Each step writes its place at its target: where another's is read, several steps have one target.
        numbers[targets] = places
        last = numbers[targets] - start
        conflicts, within = last != places - start, ends < stop
        numbers[targets] = own - ends
        numbers[start:stop] = taken
        conflicts[last[conflicts]] = True
        conflicts |= within
        conflicts[targets[within] - start] = True
        if conflicts.any():  # done over, one by one
            steps, ends = places[conflicts].tolist(), ends[conflicts].tolist()
            held = dict(zip(steps, own[conflicts].tolist(), strict=True))  # numbers by position, before the block
            held |= dict(zip(ends, taken[conflicts].tolist(), strict=True))
            for step, end in zip(steps, ends, strict=True):
                held[step], held[end] = held[end], held[step]
            at = np.fromiter(held, np.int32, len(held))
            numbers[at] = np.fromiter(held.values(), np.int32, len(held)) - np.where(at < stop, 0, at)
        self._final = stop

    def _draws(self, count: int, to_end: bool) -> np.ndarray:
        """The next numbers of 32 bits. torch takes none for the last position, whose step changes nothing."""
        pairs = torch.zeros((count + 1) // 2, dtype=torch.int64)
        whole = (count - to_end) // 2
        pairs[:whole].random_(-(2**63), None, generator=self._generator)  # the first drawn is the upper half
        words = pairs.numpy().view(np.uint64)
        draws = (words >> 32 | words << 32).view(np.uint32)[:count]
        if to_end and count % 2 == 0:  # of one left over, which decides between two positions, 31 bits do
            draws[-2] = torch.empty(1, dtype=torch.int32).random_(generator=self._generator).item()
        return draws


def advance(length: int, generator: torch.Generator) -> None:
    """Bring a generator to where `torch.randperm(length)` leaves it, for a length that `can_grow` accepts."""
    unused = torch.empty(min(length, 1 << 20), dtype=torch.int32)
    for drawn in range(0, length - 1, len(unused)):
        unused[: length - 1 - drawn].random_(generator=generator)


def can_grow(length: int) -> bool:
    """Whether a permutation is worth growing, and this version of torch draws as `GrowingPermutation` does."""
    return SHORTEST <= length < _LONGEST and _draws_as_torch()


@cache
def _draws_as_torch() -> bool:
    for length in (998, 999):
        ours, torchs = torch.Generator().manual_seed(length), torch.Generator().manual_seed(length)
        grown = GrowingPermutation(length, ours, block=64)
        grown.grow(length)
        same = torch.equal(grown.indices, torch.randperm(length, generator=torchs, dtype=torch.int32))
        if not same or not torch.equal(ours.get_state(), torchs.get_state()):
            return False
    return True
