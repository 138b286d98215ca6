"""Samplers of single indices whose order can be told, and told again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import RandomSampler


class SeedableRandomSampler(RandomSampler):
    """Random order that depends on nothing but a seed and the epoch.

    The order of epoch `e` is the one a generator seeded with `initial_seed + e` gives, so every process that knows the
    two numbers produces the same order, today and after a restart.

    Args:
        *args: passed to `torch.utils.data.RandomSampler`.
        **kwargs: passed to `torch.utils.data.RandomSampler`, except `data_seed` (int): the seed of epoch 0. Without it
            the seed of torch's default generator is taken.

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
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration draws."""
        self.epoch = epoch


class ReplayableRandomSampler(RandomSampler):
    """A `RandomSampler` that knows the seed it drew, so that an interrupted epoch can be drawn again.

    Without a generator, `RandomSampler` takes a new seed from torch's default generator each time it is iterated and
    forgets it. This one takes the very same number and keeps it.
    """

    # Class-level defaults, because `adopt` turns existing samplers into this class without calling __init__.
    seed: int | None = None
    replay: int | None = None

    @classmethod
    def adopt(cls, sampler: Any) -> None:
        """Make a plain `RandomSampler` replayable in place; any other sampler is left alone.

        The object stays the same and draws the same numbers, so that references to it remain good.
        """
        if type(sampler) is RandomSampler:
            sampler.__class__ = cls

    def __iter__(self) -> Iterator[int]:
        if self.generator is not None:
            yield from super().__iter__()
            return
        self.seed, self.replay = (draw_seed() if self.replay is None else self.replay), None
        order = super().__iter__()
        # The base class reads the generator when the first index is asked for and keeps it to itself afterwards; left
        # in place it would decide the next epoch too.
        self.generator = torch.Generator().manual_seed(self.seed)
        try:
            first = list(islice(order, 1))
        finally:
            self.generator = None
        yield from first
        yield from order


def draw_seed() -> int:
    """Take a seed from torch's default generator, the way torch's samplers and loaders do.

    Changes the state of that generator by one draw. Each process draws its own.
    """
    return int(torch.empty((), dtype=torch.int64).random_().item())
