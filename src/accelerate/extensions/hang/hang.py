"""Hang diagnosis: a daemon thread on each rank reports the stack of its training thread when another rank asks.

A rank that waits cannot tell whether a missing rank is slow or will never come: because it has ended, or because it waits itself, in
a collective for the waiting rank. The thread polls the process group's key-value store for a question, one short request each
half second; training steps do nothing. The process groups' counters of collectives show who waits for whom: all ranks start the
same collectives in the same order, so a rank with a higher counter has gone past this one.

Source:
    https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store
"""

import atexit
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import asdict
from multiprocessing import util as multiprocessing_util
from types import FrameType
from typing import Any

import torch.distributed as dist

from accelerate.base._warn import printable
from accelerate.comm.torch_dist import operations_started
from accelerate.extensions.hang import threads
from accelerate.extensions.hang.leaving import leave_hung
from accelerate.extensions.hang.monitor import LONGEST_REPORT, Monitor, joining, limits
from accelerate.extensions.hang.status import PREFIX, Diagnosis, RankStatus, interval
from accelerate.runtime import failure
from accelerate.runtime.call_site import describe
from accelerate.runtime.peers import ProcessExtension
from accelerate.runtime.rendezvous import connection

logger = logging.getLogger(__name__)

# Added to the number of questions when the process that holds the store ends: a rank that reads it stops asking.
_CLOSING = 1 << 40
# Added if all ranks must end because they hang.
_ABORTING = 1 << 41
_JOIN_S = 1.0
_LOOKS_AWAITED = 2  # how long the holder of the store waits for the others at its end, in intervals between two looks
_ENDING_S = 5.0  # for the stacks of all ranks


class Watcher:
    """Answers other ranks' questions about a thread of this process, until the group or the process ends.

    It holds the store weakly: a group that is destroyed must take its store along, as the next may need the port.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        thread: threading.Thread | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        # Called with the store at each look, and once more, with True, at the last one; one says whether it wants the next look soon.
        self.errands: list[Callable[[Any, bool], bool]] = []
        self._origin = weakref.ref(store)
        self._watched = thread or threading.current_thread()
        self._pid = os.getpid()
        self._clone: Any = None
        self._over = threading.Event()
        self.closed = False
        self._said: dict[str, Any] = {"process": threads.process()}
        self._monitor = monitor or Monitor(rank, world_size, limits())
        self._thread = threading.Thread(target=self._run, name="accelerate-hang-diagnosis", daemon=True)

    def start(self) -> None:
        """Start answering; others can look for the process from now on, even if its thread never runs."""
        with contextlib.suppress(RuntimeError):  # torch's FakeStore keeps nothing
            self._say(self.store())
        self._thread.start()

    @property
    def looks(self) -> bool:
        """Whether the thread looks at the store, in this process."""
        return self._pid == os.getpid() and self._thread.is_alive() and not self.closed

    def serves(self, store: Any) -> bool:
        """Whether this watcher was made in this process for a store."""
        return self._pid == os.getpid() and self._origin() is store

    def store(self) -> Any:
        """Return the process group's store under the prefix of watchers, for short requests of any thread."""
        return dist.PrefixStore(PREFIX, self._origin())

    def stop(self) -> None:
        """Stop answering, without a word to the others."""
        if self._pid != os.getpid():  # a fork has a copy of this object, and its parent's connection
            return
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def end(self) -> None:
        """Stop answering, and report to the others that this rank's program is over.

        The process that holds the store waits a moment for the others, since torch warns when a store goes away.
        """
        self.stop()
        if self._pid != os.getpid() or self.closed or self._thread.is_alive() or self._origin() is None:
            return
        self.closed = True
        try:
            store = self._reach()
            error = getattr(sys, "last_value", None)  # what has ended the program
            self._say(store, ended="" if error is None else f"{type(error).__name__}: {str(error)[:200]}")
            holds = _holds(self._origin(), self.rank)
            if holds:
                store.add("asked", _CLOSING)
            self._count_in(store, "left", _LOOKS_AWAITED * interval(self.world_size) * holds)
        except Exception as error:  # the process that holds the store has ended first
            logger.debug("Rank %d could not leave word that it ends: %s", self.rank, error)

    def _say(self, store: Any, **news: Any) -> None:
        self._said |= news
        store.set(f"rank/{self.rank}", json.dumps(self._said))

    def _count_in(self, store: Any, counter: str, limit_s: float) -> None:
        """Add this rank to a counter, and wait until all have."""
        count, deadline = store.add(counter, 1), time.monotonic() + limit_s
        while count < self.world_size and time.monotonic() < deadline:
            time.sleep(interval(self.world_size) / 50)
            count = store.add(counter, 0)

    def _reach(self) -> Any | None:
        """Return the store under this thread's prefix, on a separate connection if possible; None if it is gone."""
        if self._clone is None and (origin := self._origin()) is not None:
            if (clone := connection(origin)) is origin:
                return dist.PrefixStore(PREFIX, origin)
            self._clone = clone
        return self._clone and dist.PrefixStore(PREFIX, self._clone)

    def _run(self) -> None:
        try:
            answered, soon = 0, False
            while not self.closed and not self._over.wait(interval(self.world_size) / (10 if soon else 1)):
                self._monitor.look(self._frame(), self._watched.native_id)
                if self._origin() is None:
                    break
                store = self._reach()
                answered = self._answer(store, answered)
                soon = sum(errand(store, False) for errand in list(self.errands) if not self.closed) > 0
                if not self.closed and self._monitor.go_on(store.underlying_store):
                    store.add("asked", _ABORTING)
                store = None
            for errand in list(self.errands):  # one may take itself off
                errand(self._reach(), True)
        except Exception as error:  # the store is gone, and with it every rank that could ask
            logger.debug("Rank %d does not answer any longer: %s", self.rank, error)

    def _answer(self, store: Any, answered: int) -> int:
        """Answer the latest question if there is a new one; return its number."""
        asked = store.add("asked", 0)
        # Any process that reaches the store can write there: a rank ends only at its own user's request.
        if asked >= _ABORTING and self._monitor.abort_after < float("inf"):
            self._end_all(store)
        if asked % _ABORTING >= _CLOSING:
            self.closed = True
            store.add("left", 1)
        elif asked > answered:
            self._say(store, question=asked, answer=asdict(self._look()))
            store.add(f"answers/{asked}", 1)
        return asked

    def _end_all(self, store: Any) -> None:
        """End this process when all have left their stacks: the first to go would end the others by an error of its connections."""
        leave_hung(printable(store.get("report").decode(errors="replace"), LONGEST_REPORT))
        self._count_in(store, "hung", interval(self.world_size) + _ENDING_S)
        os._exit(failure.HUNG)

    def _frame(self) -> FrameType | None:
        frames = sys._current_frames()
        try:
            return frames.get(self._watched.ident) or frames.get(threading.main_thread().ident)
        finally:
            frames.clear()  # it also holds the frame of this call: a cycle that would keep the locals of all threads alive

    def _look(self) -> RankStatus:
        """Return the position of the watched thread."""
        frame = self._frame()
        if frame is None:
            return RankStatus(self.rank, answered=True, site="a place without Python code")
        site, inside = describe(frame)
        # An exception, or on Python 3.10 and 3.11 what `sys.exc_info` returns.
        caught = sys._current_exceptions().get(self._watched.ident)
        caught = caught[1] if isinstance(caught, tuple) else caught
        handles = f"handles an exception ({type(caught).__name__}: {str(caught)[:200]})" if caught is not None else ""
        facts = {"site": site, "inside": inside, "counters": operations_started(), "stack": threads.stack(frame)}
        facts |= {"still_s": self._monitor.still_s, "note": threads.loader_workers(frame) or handles}
        facts |= {"module": threads.module(frame)}
        return RankStatus(self.rank, answered=True, **facts, **threads.waits_in(frame))


def _holds(store: Any, rank: int) -> bool:
    """Whether the store most likely lives in this process: rank 0 makes it, unless torchrun's agent has one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return rank == 0 and isinstance(store, dist.TCPStore) and not agent


_watcher: Watcher | None = None
_registered_in: int | None = None


def watch(store: Any | None, rank: int, world_size: int) -> None:
    """Let this process answer where it is; free if repeated. Every rank calls it, in the thread that trains."""
    global _watcher, _registered_in
    if store is None or world_size < 2 or (_watcher is not None and _watcher.serves(store)):
        return
    if _watcher is not None:
        _watcher.stop()
    _watcher = Watcher(store, rank, world_size)
    _watcher.start()
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        # The interpreter must not end while a thread is in the store: that aborts the process.
        atexit.register(_end)
        if multiprocessing.parent_process() is not None:  # such a process leaves without a look at `atexit`
            multiprocessing_util.Finalize(None, _end, exitpriority=100)


def watcher() -> Watcher | None:
    """Return the watcher of this process that looks at its store; None without one."""
    return _watcher if _watcher is not None and _watcher.looks else None


def _end() -> None:
    if _watcher is not None:
        _watcher.end()


class HangDiagnosis(ProcessExtension):
    """Reports who is missing when processes join a group, lets each process answer, and asks for ranks that do not come."""

    def joining(self, store: Any, rank: int, world_size: int) -> contextlib.AbstractContextManager[None]:
        """Report which ranks have not come."""
        return joining(store, rank, world_size)

    def joined(self, store: Any, rank: int, world_size: int) -> None:
        """Let this process answer."""
        watch(store, rank, world_size)

    def search(self, store: Any, ranks: Collection[int], again_s: float) -> Diagnosis:
        """Return a diagnosis of all ranks."""
        return Diagnosis(store, ranks, len(ranks), again_s)
