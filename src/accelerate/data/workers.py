"""Worker processes of loaders: their random numbers, and the signals that end them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate.data.resume import mixed, seed_all

# Random numbers --------------------------------------------------------------------------------------------------------


class SeededDataset:
    """Stands before a map-style dataset in worker processes and seeds their generators for each batch.

    A torch worker draws all its random numbers from one stream, so what a batch looks like depends on how many batches
    that worker has made before. Here the seed comes from the run, the epoch and the batch's indices: the same batch looks
    the same with any number of workers, persistent or not, and wherever the run was resumed.

    It looks like the dataset: attributes, length and `isinstance` are those of the dataset inside, and what a
    `worker_init_fn` assigns to it is assigned to that.

    Args:
        dataset: a map-style dataset.
        epoch_seed: of a copy, the tensor that it shares.
    """

    def __init__(self, dataset: Any, epoch_seed: torch.Tensor | None = None) -> None:
        if epoch_seed is None:
            # In shared memory, because persistent workers live longer than the epoch they were started in.
            epoch_seed = torch.zeros(1, dtype=torch.int64).share_memory_()
        vars(self).update(_inner=dataset, _epoch_seed=epoch_seed)

    def choose(self, run_seed: int, epoch: int) -> None:
        """Set the epoch, in the process that trains, before the workers are given their first batch."""
        self._epoch_seed[0] = mixed(run_seed, epoch)

    def __getattr__(self, name: str) -> Any:
        if name in ("_inner", "_epoch_seed"):  # while a copy is being built
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    @property
    def __class__(self) -> type:
        return type(self._inner)

    def __reduce_ex__(self, protocol: int) -> Any:
        return SeededDataset, (self._inner, self._epoch_seed)

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


# Signals ---------------------------------------------------------------------------------------------------------------


class SignalMask:
    """The first thing that a worker runs, followed by the loader's own `worker_init_fn`: it blocks signals.

    Schedulers and launchers often send a signal to all processes of a job, so also to the workers, which it would end;
    torch then fails in the training process, which was about to save. So workers take these signals from their parent
    alone, which ends them with SIGTERM.

    Args:
        own: the loader's `worker_init_fn`.
        numbers: the signals; they are blocked in the worker from its start.
    """

    def __init__(self, own: Callable[[int], Any] | None, numbers: tuple[int, ...]) -> None:
        self.own = own
        self.numbers = numbers

    def __call__(self, worker: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        threading.Thread(target=self._obey_parent, daemon=True).start()
        if self.own is not None:
            self.own(worker)

    def _obey_parent(self) -> None:
        parent = os.getppid()
        while True:
            received = signal.sigwaitinfo(self.numbers)
            if received.si_signo == signal.SIGTERM and received.si_pid == parent:
                os._exit(0)  # as torch's own handler in workers does


@contextmanager
def masked_start(loader: DataLoader, numbers: tuple[int, ...]) -> Iterator[None]:
    """Mask signals in the workers that a loader starts inside a `with` block. Any rank, alone; main thread.

    Args:
        loader: the loader.
        numbers: the signals.
    """
    if not loader.num_workers or not hasattr(signal, "sigwaitinfo"):
        yield
        return
    own = loader.worker_init_fn
    _start_servers(loader)
    # New processes inherit which signals are blocked, so there is no moment at which one could end a worker.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    loader.worker_init_fn = SignalMask(own, numbers)
    try:
        yield
    finally:
        loader.worker_init_fn = own
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_servers(loader: DataLoader) -> None:
    """Start the servers that start processes for the rest of the program, which would keep blocked signals blocked."""
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method != "fork":
        resource_tracker.ensure_running()
    if method == "forkserver":
        forkserver.ensure_running()
