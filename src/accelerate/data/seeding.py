"""Random numbers of worker processes that depend on the batch alone.

A torch worker draws all its random numbers from one stream, so what a batch looks like depends on how many batches that
worker has made before. An epoch that goes on in the middle would draw other numbers. Here the generators of a worker are
seeded for each batch, from a seed of the run, the epoch and the batch's indices: the same batch looks the same with any
number of workers, persistent or not, and wherever the run was resumed.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from accelerate.data.randomness import seed_all


def mixed(*parts: Any) -> int:
    """Mix numbers, strings or lists of them into a seed of 63 bits; equal parts give equal seeds on every machine.

    Example:
        >>> mixed(3, [1, 2]) == mixed(3, [1, 2]), mixed(3, [1, 2]) == mixed(3, [2, 1])
        (True, False)
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class SeededDataset:
    """Stands before a map-style dataset in worker processes and seeds their generators for each batch.

    It looks like the dataset: attributes, length and `isinstance` are those of the dataset inside.

    Args:
        dataset: a map-style dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self._inner = dataset
        # In shared memory, because persistent workers live longer than the epoch they were started in.
        self._epoch_seed = torch.zeros(1, dtype=torch.int64).share_memory_()

    def choose(self, run_seed: int, epoch: int) -> None:
        """Set the epoch, in the process that trains, before the workers are given their first batch."""
        self._epoch_seed[0] = mixed(run_seed, epoch)

    def __getattr__(self, name: str) -> Any:
        if name in ("_inner", "_epoch_seed"):  # while a copy is being built
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def __class__(self) -> type:
        return type(self._inner)

    def __reduce_ex__(self, protocol: int) -> Any:
        return _rebuild, (self._inner, self._epoch_seed)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: Any) -> Any:
        self._seed(index)
        return self._inner[index]

    def __getitems__(self, indices: Any) -> Any:
        self._seed(indices)
        whole = getattr(self._inner, "__getitems__", None)
        return [self._inner[index] for index in indices] if whole is None else whole(indices)

    def _seed(self, key: Any) -> None:
        # Outside of a worker the dataset draws from the program's own generators.
        if torch.utils.data.get_worker_info() is not None:
            seed_all(mixed(int(self._epoch_seed[0]), key))


def _rebuild(dataset: Any, epoch_seed: torch.Tensor) -> SeededDataset:
    made = SeededDataset.__new__(SeededDataset)
    made._inner, made._epoch_seed = dataset, epoch_seed
    return made
