"""Writing a checkpoint while the training goes on: one at a time, in a thread.

The thread holds what it writes in host memory of its own, and meets the other ranks through the key-value store of the
process group, so it takes part in no collective of the training. Hashing, copying and writing release the interpreter lock.
It rests between blocks as long as no other thread waits for it. Its priority is that of any other thread: one of a low priority that holds the
interpreter lock holds up the training as long as other processes keep it from running.
"""

import atexit
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import util as multiprocessing_util
from typing import Any

import torch.distributed as dist

from accelerate.checkpoint.save import HostBuffers
from accelerate.runtime import durable

logger = logging.getLogger(__name__)


# How long the thread rests after each block, as a multiple of the time that the block took: the training is slowed for longer, but
# by little at a time.
_REST = 3.0


class Background:
    """The save of one Accelerator that is being written in the background, if there is one. It is not pickled along."""

    def __init__(self) -> None:
        self.buffers = HostBuffers()
        self._world: Any = None
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._what = ""
        self._pid = os.getpid()
        self._hurry = threading.Event()  # a thread waits for the save

    def __reduce__(self) -> tuple[Any, ...]:
        return Background, ()

    def process_group(self) -> Any | None:
        """Return the group in which ranks write shards: apart from the training's, which goes on meanwhile. All ranks."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
            return None
        if self._world is not dist.group.WORLD:
            self._world, self._group = dist.group.WORLD, dist.new_group(backend="gloo")
        return self._group

    def start(self, task: Callable[[], None], what: str, done: Callable[[], None] = lambda: None) -> None:
        """Run a task in the background; its error comes out of the next `finish`.

        The interpreter waits for the task before it exits, whether the training ended or failed. One that is about to exit starts
        no more threads: then the task runs here.

        Args:
            task: writes and publishes a checkpoint.
            what: its name, for messages.
            done: called when the task has ended, well or not.
        """
        self.finish()

        def run() -> None:
            try:
                time.sleep(0)  # the caller goes on first
                with durable.resting(_REST, self._hurry):
                    task()
                _unsettled.discard(self)
            except BaseException as error:
                self._problem = error
                # Now, too: a training that ends or fails before its next call would never report it.
                logger.error("The checkpoint %s could not be saved in the background: %s", what, error)
            finally:
                done()

        self._what, self._pid = what, os.getpid()
        self._hurry.clear()
        _unsettled.add(self)
        thread = threading.Thread(target=run, name="accelerate-checkpoint", daemon=False)
        try:
            _wait_at_exit()
            thread.start()
        except RuntimeError:
            self._hurry.set()
            run()
            return
        self._thread = thread

    def finish(self, reason: str | None = None) -> None:
        """Wait until the save in flight is written, and raise what went wrong. Any rank, alone.

        Args:
            reason: what waits for it, for the log; None says nothing.

        Raises:
            RuntimeError: the save failed on this rank or another one.
        """
        if (problem := self.settle(reason)) is not None:
            raise problem

    def settle(self, reason: str | None = None) -> RuntimeError | None:
        """Wait until the save in flight is written, and return what went wrong, once. Any rank, alone.

        Args:
            reason: what waits for it, for the log; None says nothing.
        """
        self._join(reason)
        self._thread = None  # not before: a caller that is interrupted while it waits has not waited
        cause, self._problem = self._problem, None
        _unsettled.discard(self)
        if cause is None:
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
            begun = time.monotonic()
            logger.warning("%s waits for the checkpoint %s, which is still being written.", reason, self._what)
            thread.join()
            logger.warning("%s waited %.1f s for the checkpoint %s.", reason, time.monotonic() - begun, self._what)
        thread.join()


# -- the end of the program ----------------------------------------------------------------------------------------

# Those that are saving, or whose last save failed and no call has reported it yet; their Accelerators may be gone.
_unsettled: set[Background] = set()
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
            multiprocessing_util.Finalize(None, _leave, exitpriority=1000)
        _registered_in = os.getpid()


def _join_all() -> None:
    for background in list(_unsettled):
        background._join()


def _leave() -> None:
    """End with status 1 if a save failed that no call has reported: the program must not look as if it had succeeded.

    No call is going to report it any more, and a line on the log is easily missed.
    """
    _join_all()
    if all(background._pid != os.getpid() for background in _unsettled):  # a fork has its parent's
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(1)


# Early, so that it runs late: after what the program wants to be done at its end.
atexit.register(_leave)
