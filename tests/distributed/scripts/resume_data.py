"""Data for the resume tests: every kind of loader, with random numbers in everything that a user may write himself."""

import random
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

WIDTH = 4


def sample(index: int, noise: bool) -> tuple[int, torch.Tensor]:
    """One sample: its number, and features that depend on it and on three random generators."""
    features = torch.full((WIDTH,), 0.1 * index) + torch.arange(WIDTH) / WIDTH
    if noise:
        features = features + 0.1 * torch.randn(WIDTH) + float(np.random.rand()) + random.random()
    return index, features


class Rows(Dataset):
    def __init__(self, length: int, noise: bool) -> None:
        self.length, self.noise, self.epoch = length, noise, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return sample(index % self.length, self.noise)


class Epochs:
    """What hears of the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stream(Epochs, IterableDataset):
    """A stream whose order depends on the epoch, as streams in the wild do; it does not tell its length."""

    def __init__(self, length: int, noise: bool) -> None:
        self.length, self.rows = length, Rows(length, noise)

    def __iter__(self):
        for place in range(self.length):
            yield self.rows[place + 5 * self.epoch]


class StreamWithState(Stream):
    """A stream that can save and restore its place."""

    place = start = 0

    def __iter__(self):
        self.place, self.start = self.start, 0
        while self.place < self.length:
            self.place += 1
            yield self.rows[self.place - 1 + 5 * self.epoch]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]


class Ordered(Epochs, Sampler):
    """A custom sampler, whose order a function of length and epoch returns again for each epoch."""

    def __init__(self, length: int, order: Callable[[int, int], list]) -> None:
        self.length, self.order = length, order

    def __len__(self) -> int:
        return len(self.order(self.length, self.epoch)) if self.order is varying else self.length

    def __iter__(self):
        return iter(self.order(self.length, self.epoch))


def rotated(length: int, epoch: int) -> list[int]:
    return [(3 * place + 7 * epoch) % length for place in range(length)]


def from_torch(length: int, epoch: int) -> list[int]:
    """Draw from a default generator when the sampler is iterated."""
    return torch.randperm(length).tolist()


def from_numpy(length: int, epoch: int) -> list[int]:
    return np.random.permutation(length).tolist()


def varying(length: int, epoch: int) -> list[list[int]]:
    """Batches of two and three samples in turn, for a batch sampler without `batch_size`."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    batches, size = [], 2
    while order:
        batches, order, size = [*batches, order[:size]], order[size:], 5 - size
    return batches


def samplers(rows: Rows) -> dict:
    """The sampler arguments of a loader, by name."""
    length = len(rows)
    return {
        "sequential": lambda: {"sampler": SequentialSampler(rows)},
        "shuffle": lambda: {"shuffle": True},
        "seedable": lambda: {"shuffle": True},
        "own generator": lambda: {"sampler": RandomSampler(rows, generator=torch.Generator().manual_seed(8))},
        "loader generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(8)},
        "weighted": lambda: {"sampler": WeightedRandomSampler(torch.arange(1.0, length + 1), length)},
        "custom": lambda: {"sampler": Ordered(length, rotated)},
        "draws from torch": lambda: {"sampler": Ordered(length, from_torch)},
        "draws from numpy": lambda: {"sampler": Ordered(length, from_numpy)},
        "custom batches": lambda: {"batch_sampler": Ordered(length, varying)},
    }


def loader_of(case) -> DataLoader:
    """Build the torch loader of a case."""
    if case.data == "datasets":
        return DataLoader(hugging_face_stream(case), batch_size=case.batch_size)
    streams = {"stream": Stream, "stream with state": StreamWithState}
    if case.data in streams:
        stream = streams[case.data](case.length, case.noise)
        return DataLoader(stream, batch_size=case.batch_size, num_workers=case.workers)
    rows = Rows(case.length, case.noise)
    arguments = samplers(rows)[case.sampler]()
    if "batch_sampler" not in arguments:
        arguments["batch_size"] = case.batch_size
    return DataLoader(rows, num_workers=case.workers, persistent_workers=case.persistent, **arguments)


def hugging_face_stream(case):
    """A shuffled stream of the library `datasets`, in as many pieces as a case says."""
    import datasets

    table = datasets.Dataset.from_dict({"id": list(range(case.length))})
    stream = table.to_iterable_dataset(num_shards=case.shards).shuffle(seed=3, buffer_size=5)
    return stream.map(lambda row: {"features": sample(row["id"], case.noise)[1]})


def parts(batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers and the features of a batch."""
    return (batch["id"], batch["features"]) if isinstance(batch, dict) else tuple(batch)
