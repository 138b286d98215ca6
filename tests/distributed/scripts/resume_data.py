"""Data for the resume tests: every kind of loader, with random numbers in everything that a user may write himself."""

import random

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
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
        self.length, self.noise = length, noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return sample(index, self.noise)


class Stream(IterableDataset):
    """A stream whose order depends on the epoch, as streams in the wild do."""

    def __init__(self, length: int, noise: bool) -> None:
        self.length, self.noise, self.epoch = length, noise, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        for place in range(self.length):
            yield sample((place + 5 * self.epoch) % self.length, self.noise)


class StreamWithState(Stream):
    """A stream that can save and restore its place; it counts what it really reads."""

    def __init__(self, length: int, noise: bool) -> None:
        super().__init__(length, noise)
        self.place = self.start = self.reads = 0

    def __iter__(self):
        self.place, self.start = self.start, 0
        while self.place < self.length:
            self.place += 1
            self.reads += 1
            yield sample((self.place - 1 + 5 * self.epoch) % self.length, self.noise)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]


class Rotated(Sampler):
    """A custom sampler that knows the epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        return iter([(3 * place + 7 * self.epoch) % self.length for place in range(self.length)])


class Drawing(Sampler):
    """A custom sampler that draws its order from a default generator when it is iterated."""

    def __init__(self, length: int, source: str) -> None:
        self.length, self.source = length, source

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        if self.source == "numpy":
            return iter(np.random.permutation(self.length).tolist())
        return iter(torch.randperm(self.length).tolist())


class Varying(Sampler):
    """A custom batch sampler without `batch_size`, whose batches hold two and three samples in turn."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _batches(self) -> list[list[int]]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        batches, size = [], 2
        while order:
            batches, order, size = [*batches, order[:size]], order[size:], 5 - size
        return batches

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self):
        return iter(self._batches())


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
        "subset": lambda: {"sampler": SubsetRandomSampler(range(length))},
        "custom": lambda: {"sampler": Rotated(length)},
        "draws from torch": lambda: {"sampler": Drawing(length, "torch")},
        "draws from numpy": lambda: {"sampler": Drawing(length, "numpy")},
        "custom batches": lambda: {"batch_sampler": Varying(length)},
    }


def loader_of(case) -> DataLoader:
    """Build the torch loader of a case."""
    if case.data == "datasets":
        return DataLoader(hugging_face_stream(case), batch_size=case.batch_size)
    streams = {"stream": Stream, "stream with state": StreamWithState}
    if case.data in streams:
        return DataLoader(
            streams[case.data](case.length, case.noise), batch_size=case.batch_size, num_workers=case.workers
        )
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
