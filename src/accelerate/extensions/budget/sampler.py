"""Batches by a budget of tokens: as many steps on every rank, as much work in each of a step; of similar length, or packed in a row."""

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler


class TokenBudgetSampler(Sampler[list[int]]):
    """A batch sampler with batches of at most so many tokens, padding included, that cost the ranks of a step the same.

    With `packed`, `PackingCollator` makes one row of a batch. Its lengths are chosen once, by best fit, and each epoch draws
    the samples of each length. Attention within documents costs the sum of their squared lengths: the batches of a step have
    similar ones.

    Otherwise samples are sorted by length, and shuffled among those of similar length: a *bucket*, up to some steps long. So
    there is little padding, each batch of a step comes from one bucket, and the number of steps is the same in each epoch and
    on each rank. Each sample is in one batch. Only if samples fill a batch each and their number is no multiple of the ranks,
    some are in two, as with `even_batches`. The order depends only on the seed and the epoch, so a resumed run continues with
    the next batch.

    Args:
        lengths: of each sample of the dataset, in tokens.
        max_tokens: in a batch at most: its number of samples times its longest sample; with `packed`, the sum of their lengths.
        ranks: the number of ranks that the loader is prepared for: `accelerator.num_processes`, without ranks that share a
            batch. `prepare` refuses a number that does not divide it.
        shuffle: whether samples within buckets, and the steps, are in random order; else the longest come first.
        seed: of the order.
        steps_in_bucket: more of them mix samples better, and pad more. It has no use with `packed`.
        packed: whether the samples of a batch are put one behind the other, without padding between them.

    Raises:
        ValueError: for a sample that is longer than `max_tokens`, for no samples, and for numbers below 1.

    Every rank builds it with the same arguments, and passes it to a `DataLoader` as `batch_sampler`.

    Example:
        >>> sampler = TokenBudgetSampler([7, 2, 3, 8, 2, 3], max_tokens=16, shuffle=False)
        >>> list(sampler), len(sampler)
        ([[3, 0], [2, 5, 1, 4]], 2)

    Source:
        https://arxiv.org/abs/1706.03762, section 5.1: batches of sentences by approximate length and number of tokens.
        https://arxiv.org/abs/2107.02027: packing by best fit.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        ranks: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        steps_in_bucket: int = 16,
        packed: bool = False,
    ) -> None:
        for name, value in (("max_tokens", max_tokens), ("ranks", ranks), ("steps_in_bucket", steps_in_bucket)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        token_counts = np.asarray(lengths, dtype=np.int64)
        if not len(token_counts):
            raise ValueError("lengths is empty: give the number of tokens of each sample.")
        shorter = token_counts.max() - token_counts
        if shorter.max() < 1 << 16:
            shorter = shorter.astype(np.uint16)  # which numpy sorts by its digits, in a tenth of the time
        self._longest_first = np.argsort(shorter, kind="stable")
        if (worst := token_counts[self._longest_first[0]]) > max_tokens:
            raise ValueError(
                f"Sample {self._longest_first[0]} has {worst} tokens, and max_tokens is {max_tokens}. Truncate it, or raise max_tokens."
            )
        self.ranks, self.shuffle, self.seed, self.epoch = ranks, shuffle, seed, 0
        ordered = token_counts[self._longest_first]
        batches = _pack(ordered, max_tokens, ranks) if packed else _cut(ordered, max_tokens, ranks, steps_in_bucket)
        self._bounds, self._buckets, self._members = batches

    def __len__(self) -> int:
        return len(self._bounds)

    def check_ranks(self, number: int) -> None:
        """Refuse (ValueError) a number of ranks that steps were not made for; a loader that is prepared calls it.

        Not a collective.
        """
        if self.ranks % number:
            raise ValueError(
                f"TokenBudgetSampler has ranks={self.ranks}, and its loader is prepared among {number} ranks that read data: their steps "
                f"would differ. Pass ranks={number}."
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; a prepared loader calls it. Not a collective."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order, steps = self._longest_first, np.arange(len(self) // self.ranks)
        if self.shuffle:
            draw = np.random.default_rng([self.seed, self.epoch])
            order = np.concatenate([draw.permutation(order[start:end]) for start, end in self._buckets])
            steps = draw.permutation(steps)
        order = order[self._members]
        for step in steps:
            for start, end in self._bounds[step * self.ranks : (step + 1) * self.ranks]:
                yield order[start:end].tolist()


def _cut(lengths: Any, max_tokens: int, ranks: int, steps: int) -> tuple[Any, list[tuple[int, int]], slice]:
    """Return the borders of batches and buckets in samples sorted by length, longest first; and all members.

    A bucket has full steps, up to the samples of at least nine tenths of its longest; its batches differ by one sample at most.
    """
    rising, bounds, buckets, start = -lengths, [], [], 0
    while start < len(lengths):
        fits = int(max_tokens // max(lengths[start], 1)) * ranks  # samples in a step
        least = rising.dtype.type(-math.ceil(0.9 * lengths[start]))  # of the same type: numpy would cast all of them
        similar = int(np.searchsorted(rising, least, side="right")) - start
        end = min(start + fits * min(-(-similar // fits), steps), len(lengths))
        if len(lengths) - end < ranks:  # too few for another step: they join this one
            end = len(lengths)
        count = -(-(end - start) // fits) * ranks
        cuts = start + np.arange(count + 1) * (end - start) // count
        bounds.append(np.stack([cuts[:-1], np.maximum(cuts[1:], cuts[:-1] + 1)], axis=1))
        buckets.append((start, end))
        start = end
    return np.concatenate(bounds), buckets, slice(None)


def _pack(lengths: Any, max_tokens: int, ranks: int) -> tuple[Any, list[tuple[int, int]], Any]:
    """Return where each batch begins and ends in the third result, runs of one length, and the places of samples, longest first.

    A sample goes where it leaves the least room; the batches of a step cost about the same.
    """
    batches: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # batches by their room
    rooms: list[int] = []  # these, rising
    for place, length in enumerate(lengths.tolist()):
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            number, room = len(batches), max_tokens
            batches.append([])
        else:
            number, room = with_room[rooms[at]].pop(), rooms[at]
            if not with_room[room]:
                del with_room[room], rooms[at]
        batches[number].append(place)
        if room > length:
            if room - length not in with_room:
                bisect.insort(rooms, room - length)
            with_room.setdefault(room - length, []).append(number)
    largest = [(-len(batch), number) for number, batch in enumerate(batches)]
    heapq.heapify(largest)
    for _ in range(-len(batches) % ranks):
        order, number = heapq.heappop(largest)
        halves = batches[number][::2], batches[number][1::2]
        batches.append(halves[0])
        if halves[1]:
            batches[number] = halves[1]
            heapq.heappush(largest, (-len(halves[0]), len(batches) - 1))
            heapq.heappush(largest, (-len(halves[1]), number))
        else:  # a single sample is in two, and the others before it is in a third one
            heapq.heappush(largest, (order + 1, number))
    squares = (lengths * lengths).tolist()
    batches.sort(key=lambda batch: -sum(squares[place] for place in batch))
    ends = np.cumsum([len(batch) for batch in batches])
    runs = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    bounds = np.stack([ends - [len(batch) for batch in batches], ends], axis=1)
    return bounds, list(itertools.pairwise(runs)), np.fromiter(itertools.chain.from_iterable(batches), np.int64)


@dataclass(frozen=True)
class PackingCollator:
    """Joins the documents of a batch into one row of a fixed length, as causal models of transformers read them.

    Models attend within the documents of `position_ids`, without an `attention_mask` and a cache (`use_cache=False`). So do the
    ranks that share a sequence by `cp_size` or `sp_size`; they must divide the length. The rest of the row is a document of
    padding without labels.

    Args:
        max_tokens: the length of a row.
        pad_token_id: the token of the padding.

    Returns:
        Of samples with `input_ids` and, if they are not the same, `labels`: a dict of `input_ids`, `labels`, whose first one of each
        document is -100, as the last token of another does not predict it, and `position_ids`, from 0 in each document. All are int64
        of [1, max_tokens]. ValueError for more tokens.

    A worker process of a loader calls it, as `collate_fn`; `TokenBudgetSampler(packed=True)` chooses fitting batches.

    Example:
        >>> batch = PackingCollator(8)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        >>> batch["labels"].tolist(), batch["position_ids"].tolist()
        ([[-100, 6, 7, -100, 9, -100, -100, -100]], [[0, 1, 2, 0, 1, 0, 1, 2]])
    """

    max_tokens: int
    pad_token_id: int = 0

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        shape = (1, self.max_tokens)
        row = {"input_ids": torch.full(shape, self.pad_token_id), "labels": torch.full(shape, -100)}
        row["position_ids"] = torch.zeros(shape, dtype=torch.int64)
        end = 0
        for sample in samples:
            start, end = end, end + len(sample["input_ids"])
            if end > self.max_tokens:
                total = sum(len(item["input_ids"]) for item in samples)
                raise ValueError(
                    f"The batch has {total} tokens, and max_tokens is {self.max_tokens}. Choose batches by "
                    f"TokenBudgetSampler(lengths, max_tokens={self.max_tokens}, packed=True), or raise max_tokens."
                )
            row["input_ids"][0, start:end] = torch.as_tensor(sample["input_ids"])
            row["labels"][0, start + 1 : end] = torch.as_tensor(sample.get("labels", sample["input_ids"]))[1:]
            row["position_ids"][0, start:end] = torch.arange(end - start)
        row["position_ids"][0, end:] = torch.arange(self.max_tokens - end)
        return row
