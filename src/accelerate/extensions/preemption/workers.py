"""Workers of loaders in a run that watches signals: schedulers send them to all processes of a job."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import Any

from torch.utils.data import DataLoader


class SignalMask:
    """A `worker_init_fn` that blocks signals in the worker, which only its parent may stop.

    Schedulers signal all processes of a job; a worker that ended would make torch fail in the training process.
    """

    def __init__(self, user_init: Callable[[int], Any] | None, numbers: tuple[int, ...]) -> None:
        self.own = user_init
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
    """Mask signals in the workers that a loader starts inside the block. Main thread only. Not a collective."""
    if not loader.num_workers or not hasattr(signal, "sigwaitinfo"):
        yield
        return
    user_init = loader.worker_init_fn
    _start_servers(loader)
    # New processes inherit which signals are blocked, so there is no moment at which one could end a worker.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    loader.worker_init_fn = SignalMask(user_init, numbers)
    try:
        yield
    finally:
        loader.worker_init_fn = user_init
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_servers(loader: DataLoader) -> None:
    """Start the servers that start processes for the rest of the program, which would keep blocked signals blocked."""
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method != "fork":
        resource_tracker.ensure_running()
    if method == "forkserver":
        forkserver.ensure_running()
