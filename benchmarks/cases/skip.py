"""Leaving out the beginning of an epoch: until the first batch is there, by kind of sampler and number of batches."""

import json
import statistics
import time
import warnings

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches

MANY, SOME, REPEATS = 1_000_000, 10_000, 5
warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def first_batch(loader, count):
    """Milliseconds from asking for the rest to its first batch."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        iterator = iter(skip_first_batches(loader, count))
        next(iterator)
        times.append((time.perf_counter() - start) * 1e3)
        del iterator
    return statistics.median(times)


def main():
    plain = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    rows = torch.arange(MANY + 1)
    figures = {
        f"skip {MANY:,} batches, in order (ms)": first_batch(plain.prepare(DataLoader(rows, batch_size=1)), MANY),
        f"skip {MANY:,} batches, shuffled (ms)": first_batch(
            plain.prepare(DataLoader(rows, batch_size=1, shuffle=True)), MANY
        ),
        f"skip {SOME:,} batches of a stream (ms)": first_batch(
            plain.prepare(DataLoader(Stream(SOME + 1), batch_size=1)), SOME
        ),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
