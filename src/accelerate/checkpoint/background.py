"""Writing a checkpoint while the training goes on: one at a time, in a thread that gives way to everything else.

The thread holds what it writes in host memory of its own, and meets the other ranks through the key-value store of the
process group, so it takes part in no collective of the training. Writing and hashing release the interpreter lock.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from accelerate.checkpoint.parcel import HostBuffers

logger = logging.getLogger(__name__)

# The thread's scheduling weight is a hundredth of that of the training at this niceness (Linux; elsewhere it is as any other).
_NICENESS = 19


class Background:
    """The save of one Accelerator that is being written in the background, if there is one. It is not pickled along."""

    def __init__(self) -> None:
        self.buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._what = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return Background, ()

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, task: Callable[[], None], what: str) -> None:
        """Run a task in the background; its error comes out of the next `finish`.

        The interpreter waits for the task before it exits, whether the training ended or failed.

        Args:
            task: writes and publishes a checkpoint.
            what: its name, for messages.
        """
        self.finish()

        def run() -> None:
            _give_way()
            try:
                task()
            except BaseException as error:
                self._problem = error
                # Now, too: a training that ends or fails before its next call would never tell.
                logger.error("The checkpoint %s could not be saved in the background: %s", what, error)
            finally:
                self.buffers.release()

        self._what = what
        self._thread = threading.Thread(target=run, name="accelerate-checkpoint", daemon=False)
        _wait_at_exit(self._thread)
        self._thread.start()

    def finish(self, reason: str | None = None) -> None:
        """Wait until the save in flight is written, and raise what went wrong. Any rank, alone.

        Args:
            reason: what waits for it, for the log; None says nothing.

        Raises:
            RuntimeError: the save failed on this rank or another one.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            if reason is not None and thread.is_alive():
                begun = time.monotonic()
                logger.warning("%s waits for the checkpoint %s, which is still being written.", reason, self._what)
                thread.join()
                logger.warning("%s waited %.1f s for the checkpoint %s.", reason, time.monotonic() - begun, self._what)
            thread.join()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise RuntimeError(
                f"The checkpoint {self._what} could not be saved in the background: {problem}"
            ) from problem


_waiting: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def _wait_at_exit(thread: threading.Thread) -> None:
    """Let the interpreter wait for a thread before it closes thread pools, which writing and the network use."""
    if not _waiting and hasattr(threading, "_register_atexit"):
        import concurrent.futures.thread  # noqa: F401 (what is registered last is called first)

        threading._register_atexit(lambda: [thread.join() for thread in list(_waiting) if thread.is_alive()])
    _waiting.add(thread)


def _give_way() -> None:
    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):  # a system where threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
