"""Worker processes of loaders, in a run that saves itself when a signal comes: they must outlive the signal.

Schedulers and launchers often send a signal to all processes of a job, so also to the workers, which it would end; torch then
fails in the training process, which was about to save. So workers take these signals from their parent alone: it ends them with
SIGTERM.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import Any

from torch.utils.data import DataLoader


class Shield:
    """The first thing that a worker runs, followed by the loader's own `worker_init_fn`.

    Args:
        own: the loader's `worker_init_fn`.
        numbers: the signals; they are blocked in the worker from its start.
    """

    def __init__(self, own: Callable[[int], Any] | None, numbers: tuple[int, ...]) -> None:
        self.own = own
        self.numbers = numbers

    def __call__(self, worker: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        threading.Thread(target=_obey_parent, args=(self.numbers,), daemon=True).start()
        if self.own is not None:
            self.own(worker)


def _obey_parent(numbers: tuple[int, ...]) -> None:
    parent = os.getppid()
    while True:
        received = signal.sigwaitinfo(numbers)
        if received.si_signo == signal.SIGTERM and received.si_pid == parent:
            os._exit(0)  # as torch's own handler in workers does


@contextmanager
def around_start(loader: DataLoader, numbers: tuple[int, ...]) -> Iterator[None]:
    """Shield the workers that a loader starts inside a `with` block. Any rank, alone; main thread.

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
    loader.worker_init_fn = Shield(own, numbers)
    try:
        yield
    finally:
        loader.worker_init_fn = own
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_servers(loader: DataLoader) -> None:
    """Start what starts processes for the rest of the program, before signals are blocked: it would keep them blocked in all of them."""
    context = loader.multiprocessing_context or multiprocessing
    method = context.get_start_method()
    if method == "fork":
        return
    resource_tracker.ensure_running()
    if method == "forkserver":
        forkserver.ensure_running()
