"""Samplers: orders that can be drawn again, batch samplers that are divided among processes, and which batch is the last."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from accelerate.runtime.permutation import GrowingPermutation, advance, can_grow

# The order of samples ------------------------------------------------------------------------------------------------


class SeedableRandomSampler(RandomSampler):
    """Random order that depends on nothing but a seed and the epoch, `initial_seed + epoch`.

    Args:
        *args: passed to `torch.utils.data.RandomSampler`.
        **kwargs: likewise, except `data_seed` (int): the seed of epoch 0, by default that of torch's default generator.

    Attributes:
        initial_seed: the seed of epoch 0.
        epoch: the epoch that the next iteration draws; it moves on when an iteration is used up.

    Example:
        >>> sampler = SeedableRandomSampler(range(4), data_seed=42)
        >>> first = list(sampler)
        >>> sampler.set_epoch(0)
        >>> list(sampler) == first
        True
    """

    __module__ = "accelerate.data_loader"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if seed is None else seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from _one_by_one(self)

    def _epoch_generator(self) -> torch.Generator:
        if self.generator is None:
            self.generator = torch.Generator()
        return self.generator.manual_seed(self.initial_seed + self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration draws."""
        self.epoch = epoch


class ReplayableRandomSampler(RandomSampler):
    """A `RandomSampler` that keeps the seed it drew, so that an interrupted epoch can be drawn again."""

    # Class-level defaults, because `adopt` turns existing samplers into this class without calling __init__.
    seed: int | None = None
    replay: int | None = None

    @classmethod
    def adopt(cls, sampler: Any) -> None:
        """Make a plain `RandomSampler` replayable in place; it draws the same numbers as before."""
        if type(sampler) is RandomSampler:
            sampler.__class__ = cls

    def __iter__(self) -> Iterator[int]:
        yield from _one_by_one(self)

    def _epoch_generator(self) -> torch.Generator:
        if self.generator is not None:
            return self.generator
        self.seed, self.replay = (draw_seed() if self.replay is None else self.replay), None
        return torch.Generator().manual_seed(self.seed)


def draw_seed() -> int:
    """Take a seed from torch's default generator, as torch's samplers do, which advances it by one draw."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


# An epoch's order as a tensor ------------------------------------------------------------------------------------------

_CHUNK = 1 << 14


def has_tensor_order(sampler: Any) -> bool:
    """Whether an epoch of a sampler can be drawn as a tensor: torch's own samplers and those of this module, no others."""
    return type(sampler) in (SequentialSampler, RandomSampler, ReplayableRandomSampler, SeedableRandomSampler)


class TensorOrder:
    """An epoch's indices by position: a range, or the tensor that torch's `RandomSampler` draws, bit for bit, as far as asked for.

    A large permutation grows as the epoch advances: the first batch of 50 million shuffled samples takes 0.6 s, and
    `torch.randperm` alone takes longer.

    int32 halves the memory of what fits into it, and the numbers drawn are the same.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.drawn = sampler, len(sampler)
        self.indices: Any = range(self.drawn)
        if type(sampler) is SequentialSampler:
            return
        if type(sampler) is RandomSampler:
            self.sampler = sampler = copy.copy(sampler)
            ReplayableRandomSampler.adopt(sampler)
        self.length, self.generator, self.drawn = len(sampler.data_source), sampler._epoch_generator(), 0
        # torch draws complete permutations, and with replacement 32 numbers at a time. A program may draw from its generator after
        # a loop that is left early.
        seeded = isinstance(sampler, SeedableRandomSampler) or sampler.generator is None
        stepwise = sampler.replacement and not (seeded or getattr(sampler, "generator_is_ours", False))
        self.block = 32 if stepwise else max(self.length, len(sampler) * sampler.replacement)
        size = len(sampler) if sampler.replacement else -(-len(sampler) // self.length) * self.length
        self.growing: GrowingPermutation | None = None
        if size == self.length and not sampler.replacement and can_grow(size):
            self.growing = GrowingPermutation(size, self.generator)
            self.indices, self.block = self.growing.indices, self.growing.block
        else:
            self.indices = torch.empty(size, dtype=torch.int32 if self.length < 1 << 31 else torch.int64)

    def draw(self, stop: int) -> None:
        """Draw the blocks that begin before position `stop`."""
        if stop <= self.drawn or self.drawn == len(self.indices):
            return
        if self.growing is not None:
            self.drawn = self.growing.grow(stop)
            return
        stop = -(-stop // self.block) * self.block
        missing, self.drawn = self.indices[self.drawn : stop], min(stop, len(self.indices))
        if self.sampler.replacement:
            torch.randint(self.length, (len(missing),), generator=self.generator, out=missing)
            return
        for part in missing.split(self.length):
            torch.randperm(self.length, generator=self.generator, out=part)

    def part(self, start: int, stop: int) -> list[int]:
        """The indices from a position on up to another, which are drawn."""
        part = self.indices[start:stop]
        return part.tolist() if isinstance(part, torch.Tensor) else list(part)

    def finish(self) -> None:
        """Draw one permutation more, as torch does at the end: a program may continue to draw from its generator."""
        sampler = self.sampler
        self.draw(len(sampler))
        del self.indices
        if type(sampler) is SequentialSampler:
            return
        if self.generator is sampler.generator and not (sampler.replacement or len(sampler) % self.length):
            (advance if can_grow(self.length) else torch.randperm)(self.length, generator=self.generator)
        if isinstance(sampler, SeedableRandomSampler):
            sampler.epoch += 1


def _one_by_one(sampler: RandomSampler) -> Iterator[int]:
    """Iterate over a random sampler as torch does, without the list that torch makes of a permutation."""
    order, samples = TensorOrder(sampler), len(sampler)
    for start in range(0, samples, order.block):
        order.draw(start + 1)
        for chunk in order.indices[start : min(start + order.block, samples)].split(_CHUNK):
            yield from chunk.tolist()
    order.finish()


# Samplers inside of samplers -----------------------------------------------------------------------------------------


def layers(sampler: Any, hidden: bool = False) -> Iterator[Any]:
    """Yield a sampler and, one after the other, those inside: batch samplers, then the sampler that decides the order.

    `hidden` says to follow a sampler that is kept under any other name than torch's, too.
    """
    seen: dict[int, Any] = {}
    while sampler is not None and id(sampler) not in seen:
        yield sampler
        seen[id(sampler)] = sampler
        inner = sampler.batch_sampler if hasattr(sampler, "batch_sampler") else getattr(sampler, "sampler", None)
        if inner is None and hidden:
            values = getattr(sampler, "__dict__", {}).values()
            inner = next((value for value in values if isinstance(value, Sampler) and value is not sampler), None)
        sampler = inner


def innermost(sampler: Any) -> Any:
    """The batch sampler (or sampler) below the shards and skips of this package."""
    while isinstance(sampler, (BatchSamplerShard, SkipBatchSampler)):
        sampler = sampler.batch_sampler
    return sampler


def unskipped(sampler: Any) -> tuple[Any, int]:
    """The sampler below the skips of this package, and the number of batches that they omit."""
    count = 0
    while isinstance(sampler, SkipBatchSampler):
        sampler, count = sampler.batch_sampler, count + sampler.skip_batches
    return sampler, count


# Beginning in the middle ---------------------------------------------------------------------------------------------


def batches_from(batch_sampler: Iterable[Any], start: int, extra: int = 0) -> Iterator[Any]:
    """Iterate from batch `start` and `extra` samples on; skipped batches are not built where the kind permits."""
    if isinstance(batch_sampler, SkipBatchSampler):
        extra += batch_sampler.skip_samples
        return batches_from(batch_sampler.batch_sampler, batch_sampler.skip_batches + start, extra)
    if (start or extra) and type(batch_sampler) is BatchSampler:
        batch_sampler = BatchSamplerShard(batch_sampler, even_batches=False)
    if isinstance(batch_sampler, BatchSamplerShard):
        return batch_sampler.iter_from(start, extra)
    return split_head(batch_sampler, 0, start)[1]


def skips_samples(batch_sampler: Any) -> bool:
    """Whether a batch sampler can begin at any sample, not only at a full batch."""
    inner, _ = unskipped(batch_sampler)
    return inner.deals_samples if isinstance(inner, BatchSamplerShard) else type(inner) is BatchSampler


def split_head(items: Iterable[Any], keep: int, start: int) -> tuple[list[Any], Iterator[Any]]:
    """Return the first `keep` items, and the rest from position `start` on, in one pass."""
    items = iter(items)
    head = list(islice(items, keep))
    return head, chain(head[start:], islice(items, max(0, start - keep), None))


# Shards --------------------------------------------------------------------------------------------------------------

# A *round* is what all shards together receive in one step: one batch per shard. When the data runs out in the middle of
# a round, it is completed with samples from the beginning of the data, so that every shard takes the same number of steps.
# Those duplicates must not count in a metric: a `round_log` holds, by the number of the round in its epoch, the number of
# real samples at the front of each shard's batch. The loader reads it when it yields the batch, which may be several
# batches later when workers read ahead.


# Samples of `Part.order_head`.
MOST_KEPT = 1000


class Rounds(NamedTuple):
    """Which samples of a round belong to which shard: `size` to each of `shards`, one after the other, the real ones first."""

    size: int
    shards: int

    @property
    def total(self) -> int:
        """Samples of all shards."""
        return self.size * self.shards

    def real(self, samples: int) -> tuple[int, ...]:
        """Return how many of so many real samples each shard has."""
        return tuple(min(max(samples - shard * self.size, 0), self.size) for shard in range(self.shards))

    def share(self, shard: int) -> slice:
        """Return the positions of the samples of a shard."""
        return slice(self.size * shard, self.size * (shard + 1))


def check_split(batch_size: int | None, num_shards: int) -> None:
    """Refuse a batch size that `split_batches` cannot divide."""
    if batch_size is None or batch_size % num_shards:
        raise ValueError(
            f"split_batches=True cuts every batch into {num_shards} equal parts, which a batch size of {batch_size} does not "
            f"allow. Use a batch_size that is a multiple of {num_shards}, or split_batches=False."
        )


class Part:
    """The part of one process of data that all processes read in rounds. Attributes may be assigned between iterations."""

    even_batches = True  # the last round is completed

    def __init__(
        self, batch_size: int | None, drop_last: bool, num_processes: int, process_index: int, split_batches: bool
    ) -> None:
        if split_batches:
            check_split(batch_size, num_processes)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.round_log: dict[int, tuple[int, ...]] = {}
        # Beginning of the undivided order, as of the last iteration.
        self.order_head: list[Any] = []

    def _rounds(self) -> Rounds:
        size = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        return Rounds(size, self.num_processes)

    def _shares(
        self, samples: Iterator[Any], head: Sequence[Any], number: int = 0, even: bool = True
    ) -> Iterator[list[Any]]:
        """Yield the samples of each round from `number` on; the last is dropped, completed with `head`, or left short."""
        rounds = self._rounds()
        while (of_round := list(islice(samples, rounds.total))) and (
            len(of_round) == rounds.total or not self.drop_last
        ):
            if share := self._share(rounds, of_round, number, head if even else ()):
                yield share
            number += 1

    def _share(self, rounds: Rounds, samples: list[Any], number: int, head: Iterable[Any]) -> list[Any]:
        """Return this process's samples of round `number`; a short round is completed with `head`, if any, and logged."""
        if head and len(samples) < rounds.total:
            self.round_log[number] = rounds.real(len(samples))
            samples = list(islice(chain(samples, cycle(head)), rounds.total))
        return samples[rounds.share(self.process_index)]


class BatchSamplerShard(Part, BatchSampler):
    """Gives one process its part of the batches of another batch sampler.

    By default the processes take unchanged batches in turn (the batch size is that of a process); with `split_batches` every
    batch is divided into equal parts (the batch size is that of all). Attributes may be assigned between iterations.

    Args:
        batch_sampler: iterable of lists of indices; `batch_size` and `drop_last` are used where it has them.
        num_processes: number of parts.
        process_index: which part to yield, from 0.
        split_batches: divide each batch instead of taking batches in turn.
        even_batches: complete the last round with samples from the beginning, so that all processes take the same number
            of equally large steps; otherwise some end earlier or with a smaller batch. With `drop_last` it is dropped.

    Raises:
        ValueError: `split_batches` with a batch size that the processes cannot share equally.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> batches = BatchSampler(range(10), batch_size=3, drop_last=False)
        >>> list(BatchSamplerShard(batches, num_processes=2, process_index=1))
        [[3, 4, 5], [9, 0, 1]]
    """

    __module__ = "accelerate.data_loader"

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        size, drop_last = getattr(batch_sampler, "batch_size", None), getattr(batch_sampler, "drop_last", False)
        super().__init__(size, drop_last, num_processes, process_index, split_batches)
        self.batch_sampler = batch_sampler
        self.even_batches = even_batches

    @property
    def total_length(self) -> int:
        """Number of batches before sharding."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        if self.split_batches:
            return batches - 1 if self._misses_last_batch() else batches
        rounds, rest = divmod(batches, self.num_processes)
        if self.drop_last or not rest:
            return rounds
        return rounds + 1 if self.even_batches or self.process_index < rest else rounds

    def _misses_last_batch(self) -> bool:
        """Whether an uneven split leaves nothing of the short last batch for this process."""
        sampler = getattr(self.batch_sampler, "sampler", None)
        if self.even_batches or self.drop_last or not hasattr(sampler, "__len__"):
            return False
        return 0 < len(sampler) % self.batch_size <= self._rounds().share(self.process_index).start

    def has_round_after(self, rounds: int, extra: int) -> bool:
        """Whether any process has a batch after so many rounds and `extra` samples beyond them, as far as lengths tell."""
        try:
            if self.deals_samples:
                per_round, total = self._rounds().total, len(self.batch_sampler.sampler)
            else:
                per_round, total = 1 if self.split_batches else self.num_processes, self.total_length
        except TypeError:
            return False
        return rounds * per_round + extra + (per_round if self.drop_last else 1) <= total

    def __iter__(self) -> Iterator[list[int]]:
        return self.iter_from(0)

    def iter_from(self, start: int, extra: int = 0) -> Iterator[list[int]]:
        """Iterate from batch number `start`, and `extra` samples of all processes beyond it, on."""
        return (self._from_samples if self.deals_samples else self._walked)(start, extra)

    @property
    def deals_samples(self) -> bool:
        """Whether torch's batch sampler batches the order of the samples; else this process walks through all batches."""
        inner, size = self.batch_sampler, self.batch_size
        plain = type(inner) is BatchSampler and (inner.batch_size, inner.drop_last) == (size, self.drop_last)
        return plain and not (self.split_batches and size % self.num_processes)

    def _from_samples(self, number: int, extra: int) -> Iterator[list[int]]:
        """Take this process's samples of each round from `number` on: from an order in memory at no cost for those of others."""
        self.round_log.clear()
        sampler, rounds = self.batch_sampler.sampler, self._rounds()
        total, share = rounds.total, rounds.share(self.process_index)
        begin = number * total + extra
        if not has_tensor_order(sampler):
            head, tail = split_head(sampler, total, begin)
            self.order_head = head[:MOST_KEPT]
        else:
            order, samples = TensorOrder(sampler), len(sampler)
            order.draw(min(total, samples))
            self.order_head = order.part(0, min(total, samples, MOST_KEPT))
            full_rounds, rest = divmod(max(0, samples - begin), total)
            for start in range(begin, begin + full_rounds * total, total):
                order.draw(start + total)
                yield order.part(start + share.start, start + share.stop)
            order.draw(samples)
            head, tail = order.part(0, min(total, samples)), order.part(samples - rest, samples)
            order.finish()  # nothing else tells that a round is the last
            number += full_rounds
        yield from self._shares(iter(tail), head, number, self.even_batches)

    def _walked(self, start: int, _: int) -> Iterator[list[int]]:
        self.round_log.clear()
        split, size, index = self.split_batches, self.batch_size, self.process_index
        per_round = 1 if split else self.num_processes
        share = self._rounds().share(index) if split else index
        head, batches = split_head(self.batch_sampler, per_round, start * per_round)
        self.order_head = list(islice(chain.from_iterable(head), MOST_KEPT))
        rounds = EndAhead(iter(lambda: list(islice(batches, per_round)), []))
        for number, group in enumerate(rounds, start):
            is_last = rounds.ended
            complete = len(group) == per_round and size in (None, len(group[-1]))
            if complete or not (is_last or split):
                yield group[0][share] if split else group[share]
            elif not (is_last and self.drop_last):
                yield from self._part_of_odd_round(group, head, number, is_last)

    def _part_of_odd_round(
        self, group: list[list[int]], head: list[list[int]], number: int, is_last: bool
    ) -> list[list[int]]:
        """This process's batch, if any, of a round whose batches do not have the declared number or size."""
        shards, index = self.num_processes, self.process_index
        if self.batch_size is None:
            # The size of a batch is not known, so the round is completed with full batches.
            if self.even_batches:
                self.round_log[number] = tuple(len(batch) for batch in group) + (0,) * (shards - len(group))
                group = list(islice(chain(group, cycle(head)), shards))
            return group[index : index + 1]
        samples = list(chain.from_iterable(group))
        # A sampler may not keep to its batch_size: all its samples are divided.
        rounds = Rounds(max(-(-len(samples) // shards), self._rounds().size if is_last else 0), shards)
        fill = chain.from_iterable(head) if self.even_batches or not is_last else ()
        share = self._share(rounds, samples, number, fill)
        return [share] if share else []


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches.

    Args:
        batch_sampler: iterable of batches.
        skip_batches: how many to omit.
        skip_samples: how many samples, of all processes together, to omit beyond them.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> list(SkipBatchSampler(BatchSampler(range(5), 2, False), skip_batches=1))
        [[2, 3], [4]]
    """

    __module__ = "accelerate.data_loader"

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0, skip_samples: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = math.ceil(skip_batches or 0)
        self.skip_samples = skip_samples

    def __getattr__(self, name: str) -> Any:
        # batch_size, drop_last, set_epoch, split_batches and the like are those of the sampler inside.
        if name == "batch_sampler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __iter__(self) -> Iterator[Any]:
        return batches_from(self.batch_sampler, self.skip_batches, self.skip_samples)

    @property
    def total_length(self) -> int:
        """Number of batches before skipping."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class SamplerShard(BatchSamplerShard):
    """Gives one process its part of a sampler of single indices, for loaders that do not batch."""

    def __init__(self, sampler: Any, num_processes: int, process_index: int, even_batches: bool = True) -> None:
        singles = BatchSampler(sampler, batch_size=1, drop_last=False)
        super().__init__(singles, num_processes, process_index, even_batches=even_batches)

    def iter_from(self, start: int, extra: int = 0) -> Iterator[int]:
        """Iterate over this process's indices from its index number `start`."""
        return (index for [index] in super().iter_from(start, extra))


# The last batch ------------------------------------------------------------------------------------------------------


_END = object()


class EndAhead:
    """Items, as of a sampler or of a loader, and whether the one given last was the last (`ended`); reads one ahead. Its own iterator."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source, self.ended, self._items = source, False, None

    def __iter__(self) -> EndAhead:
        # Nothing is drawn yet: torch draws another seed between opening a loader and asking for the first item.
        self._items = None
        return self

    def draw(self) -> None:
        """Let the sampler draw its order now, rather than with the first item of the running iteration."""
        self._items = iter(self.source)
        self._following = next(self._items, _END)

    def __next__(self) -> Any:
        if self._items is None:
            self.draw()
        item = self._following
        if item is _END:
            raise StopIteration
        self._following = next(self._items, _END)
        self.ended = self._following is _END
        return item
