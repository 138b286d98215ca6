"""What finding its batches costs one of many ranks, and what a shuffled epoch of 50 million samples costs at its first batch.

    python tests/scale/sampling.py [--quick]

Prints a table and a line of JSON. A rank's batches are slices of the epoch's order, so the number of ranks makes no difference.
From 33 million shuffled samples on the order grows as the epoch advances, so a batch costs the draws of its step, which a smaller
order has paid before its first batch. A custom sampler, which nothing is known of, is walked.
"""

import gc
import json
import resource
import statistics
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from accelerate.data.samplers import TensorOrder
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader

RANKS = (8, 128, 1024, 16_384)
BATCH, STEPS, ROUNDS, LARGE = 4, 100, 5, 50_000_000


class Numbers(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Custom(Sampler):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        return iter(range(self.length))


def prepared(length: int, ranks: int, **options) -> DataLoader:
    """The loader of a rank in the middle."""
    loader = DataLoader(Numbers(length), batch_size=BATCH, **options)
    return prepare_data_loader(loader, num_processes=ranks, process_index=ranks // 2)


def microseconds(ranks: int, steps: int = STEPS, rounds: int = ROUNDS, **options) -> float:
    """The median, over some stretches of an epoch, of what a batch costs after the first."""
    batches = iter(prepared(ranks * BATCH * (steps * rounds + 3), ranks, **options))
    next(batches)
    found = []
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            next(batches)
        found.append((time.perf_counter() - start) / steps * 1e6)
    gc.enable()
    return round(statistics.median(found), 1)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def large(samples: int) -> dict[str, float]:
    """Seconds and memory until the first batch; seconds of all draws of an epoch, and of torch for the permutation alone."""
    before, start = peak(), time.perf_counter()
    next(iter(prepared(samples, 1024, shuffle=True)))
    took, memory = time.perf_counter() - start, peak() - before >> 10
    found = {"first_batch_s": round(took, 2), "first_batch_MiB": memory}
    order = TensorOrder(SeedableRandomSampler(Numbers(samples)))
    for name, draw in (("all_draws_s", order.draw), ("torch_randperm_s", torch.randperm)):
        start = time.perf_counter()
        draw(samples)
        found[name] = round(time.perf_counter() - start, 2)
    return found


def measure(quick: bool = False) -> dict[str, dict]:
    """All figures: microseconds a batch by sampler and number of ranks, and the large epoch's. It comes first, for the memory."""
    found = {"large": large(LARGE // 10 if quick else LARGE)}
    most = RANKS[:3] if quick else RANKS
    for name, options in (("in order", {}), ("shuffled", {"shuffle": True})):
        found[name] = {ranks: microseconds(ranks, **options) for ranks in most}
    # The draws of the ranks before it are made one by one, in C.
    drawn = {ranks: RandomSampler(range(ranks * BATCH * 103), replacement=True) for ranks in most}
    found["with replacement"] = {ranks: microseconds(ranks, 20, sampler=sampler) for ranks, sampler in drawn.items()}
    found["custom"] = {
        ranks: microseconds(ranks, 20, 1, sampler=Custom(ranks * BATCH * 23)) for ranks in most if ranks <= 1024
    }
    return found


if __name__ == "__main__":
    figures = measure("--quick" in sys.argv)
    print("microseconds a batch", *(f"{ranks:>8}" for ranks in RANKS), "ranks")
    for kind in ("in order", "shuffled", "with replacement", "custom"):
        print(f"{kind:<20}", *(f"{figures[kind].get(ranks, '-'):>8}" for ranks in RANKS))
    print(f"first batch of {LARGE:,} shuffled samples:", figures["large"])
    print("RESULT", json.dumps(figures))
