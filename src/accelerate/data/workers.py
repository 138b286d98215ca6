"""Worker processes of loaders: their random numbers, and the signals that end them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from accelerate.runtime.generators import mixed, seed_all

_NO_EPOCH = -1

# Datasets in workers -----------------------------------------------------------------------------------------------------


class WorkerDataset:
    """Wraps a dataset and brings its epoch into worker processes; otherwise it looks and assigns like the dataset."""

    def __init__(self, dataset: Any, shared: torch.Tensor | None = None, epoch: int = _NO_EPOCH) -> None:
        if shared is None:
            # Seed and epoch, in shared memory because persistent workers live longer than the epoch they were started in.
            shared = torch.tensor([0, _NO_EPOCH]).share_memory_()
        vars(self).update(_inner=dataset, _shared=shared, _epoch=epoch)

    def announce(self, epoch: int) -> None:
        """Let workers that are running set this epoch, which the dataset in this process has, before they read on."""
        vars(self)["_epoch"] = self._shared[1] = epoch

    def _follow(self, epoch: int) -> None:
        if epoch != self._epoch:
            vars(self)["_epoch"] = epoch
            self._inner.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if name in ("_inner", "_shared", "_epoch"):  # while a copy is being built
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    @property
    def __class__(self) -> type:
        return type(self._inner)

    def __reduce_ex__(self, protocol: int) -> Any:
        return type(self), (self._inner, self._shared, self._epoch)

    def __len__(self) -> int:
        return len(self._inner)


class SeededDataset(WorkerDataset):
    """Stands before a map-style dataset in worker processes and seeds their generators for each batch.

    The seed comes from that of the loader, the epoch and the batch's indices, so a batch looks the same with any workers, persistent
    or not, and wherever the run was resumed.
    """

    def choose(self, seed: int | None, epoch: int, generator: torch.Generator | None) -> int:
        """Set the epoch, in the process that trains, before the workers are given their first batch; return the loader's seed."""
        if seed is None:
            # What torch draws next for the workers, without drawing it: loaders of a run differ, and runs of one seed do not.
            source = torch.default_generator if generator is None else generator
            ahead = torch.Generator(source.device)
            ahead.set_state(source.get_state())
            seed = int(torch.empty((), dtype=torch.int64, device=source.device).random_(generator=ahead))
        self._shared[0] = mixed(seed, epoch)
        return seed

    def __getitem__(self, index: Any) -> Any:
        self._begin_batch(index)
        return self._inner[index]

    def __getitems__(self, indices: Any) -> Any:
        self._begin_batch(indices)
        get_all = getattr(self._inner, "__getitems__", None)
        return [self._inner[index] for index in indices] if get_all is None else get_all(indices)

    def _begin_batch(self, key: Any) -> None:
        # Outside of a worker the dataset draws from the program's own generators.
        if torch.utils.data.get_worker_info() is not None:
            seed, epoch = self._shared.tolist()
            self._follow(epoch)
            seed_all(mixed(seed, key))


class EpochStream(WorkerDataset):
    """Stands before a stream that knows `set_epoch` in persistent workers, which open it again for each epoch."""

    def __iter__(self) -> Iterator[Any]:
        if torch.utils.data.get_worker_info() is not None:
            self._follow(int(self._shared[1]))
        return iter(self._inner)
