"""Saving while the training continues: one save at a time, in a thread, from copies in host memory.

The thread meets the other ranks through the key-value store of the process group, so it takes part in no collective of the training.
Hashing, copying and writing release the interpreter lock. The thread rests between blocks as long as no other thread waits for it. Its
priority is that of any other thread: a thread of a low priority that holds the interpreter lock would delay the training for longer.
"""

import contextlib
import logging
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.extensions.async_save.copies import HostBuffers
from accelerate.runtime import durable
from accelerate.runtime.exit import run_last

logger = logging.getLogger(__name__)

# How long the thread rests after each block, as a multiple of the time that the block took: the training is slowed for longer, but
# by little at a time.
_REST = 3.0


@contextlib.contextmanager
def resting(rest: float, hurry: threading.Event) -> Iterator[None]:
    """Let this thread rest after each block that it writes, `rest` times as long as it took, until `hurry` is set."""
    durable.pace.rest = lambda took: hurry.is_set() or hurry.wait(rest * took)
    try:
        yield
    finally:
        del durable.pace.rest


class Background:
    """The background save of one Accelerator, which a pickle does not have."""

    def __init__(self) -> None:
        self.buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._what = ""
        self._pid = os.getpid()
        self._hurry = threading.Event()  # a thread waits for the save

    def __reduce__(self) -> tuple[Any, ...]:
        return Background, ()

    def renew_buffers(self) -> None:
        """Release the memory of copies, once a save that is being written has ended."""
        self.buffers = HostBuffers()

    def start(self, task: Callable[[], None], what: str) -> None:
        """Run a task in a thread, or here where the interpreter is about to exit; `finish` raises its error.

        The interpreter waits for the thread before it exits. Then the memory of the copies is free again.
        """
        self.finish()

        def run() -> None:
            try:
                time.sleep(0)  # the caller continues first
                with resting(_REST, self._hurry):
                    task()
                _unreported.discard(self)
            except BaseException as error:
                self._problem = error
                # Now, too: a training that ends or fails before its next call would never report it.
                logger.error("The checkpoint %s could not be saved in the background: %s", what, error)
            finally:
                self.buffers.release()

        self._what, self._pid = what, os.getpid()
        self._hurry.clear()
        _unreported.add(self)
        thread = threading.Thread(target=run, name="accelerate-checkpoint", daemon=False)
        try:
            _wait_at_exit()
            thread.start()
        except RuntimeError:
            self._hurry.set()
            run()
            return
        self._thread = thread

    def finish(self) -> None:
        """Wait until the save in flight is written, and raise what went wrong, as RuntimeError.

        Not a collective.
        """
        if (problem := self.wait()) is not None:
            self.forget()
            raise problem

    def forget(self) -> None:
        """Let the error of the last save count as reported."""
        self._problem = None
        _unreported.discard(self)

    def wait(self, reason: str | None = None) -> RuntimeError | None:
        """Wait until the save in flight is written; return what went wrong, also next time, until `forget`. `reason` names who waits."""
        self._join(reason)
        # Not before: a caller that is interrupted while it waits has not waited.
        self._thread, cause = None, self._problem
        if cause is None:
            self.forget()
            return None
        problem = RuntimeError(f"The checkpoint {self._what} could not be saved in the background: {cause}")
        problem.__cause__ = cause
        return problem

    def _join(self, reason: str | None = None) -> None:
        thread = self._thread
        if thread is None or self._pid != os.getpid():  # a fork has its parent's, which writes on
            return
        self._hurry.set()
        if reason is not None and thread.is_alive():
            logger.warning("%s waits for the checkpoint %s, which is still being written.", reason, self._what)
        thread.join()


# -- the end of the program ----------------------------------------------------------------------------------------

# Those that are saving, or whose last save failed and no call has reported it yet; their Accelerators may be gone.
_unreported: set[Background] = set()
_registered_in: int | None = None


def _wait_at_exit() -> None:
    """Let the interpreter wait for a save before it closes thread pools, which writing and the network use."""
    global _registered_in
    if _registered_in != os.getpid():
        if hasattr(threading, "_register_atexit"):
            import concurrent.futures.thread  # noqa: F401 (what is registered last is called first)

            threading._register_atexit(_join_all)
        if multiprocessing.parent_process() is not None:
            # Such a process leaves without a look at `atexit`, and first reports to the other ranks that it ends.
            multiprocessing.util.Finalize(None, _leave, exitpriority=1000)
        _registered_in = os.getpid()


def _join_all() -> None:
    for background in list(_unreported):
        background._join()


def _leave() -> None:
    """End with status 1 if a save failed that no call has reported, so that the program does not look successful."""
    _join_all()
    if all(background._pid != os.getpid() for background in _unreported):  # a fork has its parent's
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(1)


run_last(_leave)
