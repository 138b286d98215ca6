"""Batches by a budget of tokens: samples of similar length together, as many steps on every rank, as much work in each of a step."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler


class TokenBudgetSampler(Sampler[list[int]]):
    """A batch sampler whose batches have at most so many tokens, padding included, and cost the ranks of a step the same.

    Samples are sorted by length, and shuffled among those of similar length: a *bucket*, up to some steps long. So padding is little, each
    batch of a step comes from one bucket, and the number of steps is the same in each epoch and on each rank. Each sample is in one
    batch; only where samples fill a batch each and their number is no multiple of the ranks, some are in two, as `even_batches` does
    it. The order is that of the seed and the epoch alone, so a run that is resumed goes on with the batch that was next.

    Args:
        lengths: of each sample of the dataset, in tokens.
        max_tokens: in a batch at most: its number of samples times its longest sample.
        ranks: among how many ranks the loader is prepared: `accelerator.num_processes`, without ranks that share a batch.
            `prepare` refuses another number.
        shuffle: whether samples within buckets, and the steps, are in random order; else the longest come first.
        seed: of the order.
        steps_in_bucket: more of them mix samples better, and pad more.

    Raises:
        ValueError: for a sample that is longer than `max_tokens`, for no samples, and for numbers below 1.

    Every rank makes it alike, and passes it to a `DataLoader` as `batch_sampler`.

    Example:
        >>> sampler = TokenBudgetSampler([7, 2, 3, 8, 2, 3], max_tokens=16, shuffle=False)
        >>> list(sampler), len(sampler)
        ([[3, 0], [2, 5, 1, 4]], 2)

    Source:
        https://arxiv.org/abs/1706.03762, section 5.1: batches of sentences by approximate length and number of tokens.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        ranks: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        steps_in_bucket: int = 16,
    ) -> None:
        for name, value in (("max_tokens", max_tokens), ("ranks", ranks), ("steps_in_bucket", steps_in_bucket)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        known = np.asarray(lengths, dtype=np.int64)
        if not len(known):
            raise ValueError("lengths is empty: give the number of tokens of each sample.")
        shorter = known.max() - known
        if shorter.max() < 1 << 16:
            shorter = shorter.astype(np.uint16)  # which numpy sorts by its digits, in a tenth of the time
        self._longest_first = np.argsort(shorter, kind="stable")
        if (worst := known[self._longest_first[0]]) > max_tokens:
            raise ValueError(
                f"Sample {self._longest_first[0]} has {worst} tokens, and max_tokens is {max_tokens}. Truncate it, or raise max_tokens."
            )
        self.ranks, self.shuffle, self.seed, self.epoch = ranks, shuffle, seed, 0
        self._bounds, self._buckets = _cut(known[self._longest_first], max_tokens, ranks, steps_in_bucket)

    def __len__(self) -> int:
        return len(self._bounds)

    def check_ranks(self, number: int) -> None:
        """Refuse (ValueError) a number of ranks that steps were not made for; a loader that is prepared calls it."""
        if self.ranks % number:
            raise ValueError(
                f"TokenBudgetSampler has ranks={self.ranks}, and its loader is prepared among {number} ranks that read data: their steps "
                f"would differ. Pass ranks={number}."
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; a prepared loader calls it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order, steps = self._longest_first, np.arange(len(self) // self.ranks)
        if self.shuffle:
            draw = np.random.default_rng([self.seed, self.epoch])
            order = np.concatenate([draw.permutation(order[start:end]) for start, end in self._buckets])
            steps = draw.permutation(steps)
        for step in steps:
            for start, end in self._bounds[step * self.ranks : (step + 1) * self.ranks]:
                yield order[start:end].tolist()


def _cut(lengths: Any, max_tokens: int, ranks: int, steps: int) -> tuple[Any, list[tuple[int, int]]]:
    """Return where each batch and each bucket begins and ends in samples that are sorted by length, longest first.

    A bucket has whole steps, as many as samples of nine tenths of its longest fill; its batches differ by one sample at most.
    """
    rising, bounds, buckets, start = -lengths, [], [], 0
    while start < len(lengths):
        fits = int(max_tokens // max(lengths[start], 1)) * ranks  # samples in a step
        least = rising.dtype.type(-math.ceil(0.9 * lengths[start]))  # of the same type: numpy would cast all of them
        similar = int(np.searchsorted(rising, least, side="right")) - start
        end = min(start + fits * min(-(-similar // fits), steps), len(lengths))
        if len(lengths) - end < ranks:  # too few for a step of their own: they join this one
            end = len(lengths)
        count = -(-(end - start) // fits) * ranks
        cuts = start + np.arange(count + 1) * (end - start) // count
        bounds.append(np.stack([cuts[:-1], np.maximum(cuts[1:], cuts[:-1] + 1)], axis=1))
        buckets.append((start, end))
        start = end
    return np.concatenate(bounds), buckets
