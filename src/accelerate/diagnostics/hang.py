"""Hang diagnosis: a daemon thread on each rank reports the stack of its training thread when another rank asks.

A rank that waits cannot tell whether a missing rank is slow or will never come: because it has ended, or because it waits itself, in
a collective for the waiting rank. The thread polls the process group's key-value store for a question, one short request each
half second; training steps do nothing. The process groups' counters of collectives show who waits for whom: all ranks start the
same collectives in the same order, so a rank with a higher counter has gone past this one.

Source:
    https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store
"""

import atexit
import json
import logging
import multiprocessing
import os
import sys
import sysconfig
import threading
import time
import weakref
import zlib
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

_PREFIX = "accelerate/hang"
# Seconds between two looks at the store; a large run asks less often, so that its one store sees 200 requests a second.
_INTERVAL_S = 0.5
_PER_SECOND = 200
# A thread that stands still stands still in all samples.
_SAMPLES, _SAMPLE_PAUSE_S = 5, 0.03
# Added to the number of questions when the process that holds the store ends: a rank that reads it stops asking.
_CLOSING = 1 << 40
_JOIN_S = 1.0

_OURS = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = tuple({sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep})
_PACKAGES = ("site-packages" + os.sep, "dist-packages" + os.sep)
# Where a thread is while it waits for other ranks. Backward passes count, because gradients are exchanged in them.
_WAITING_IN = ("torch.distributed", "torch.autograd", "torch.nn.parallel", "accelerate.comm")


@dataclass(frozen=True)
class RankStatus:
    """What one rank says about itself.

    Attributes:
        ended: whether it has said that its program is over.
        alive: whether its process exists; None where that cannot be seen from here, as on another machine.
        site: the innermost line outside of torch and this library; `inside` is what was called there.
        waits: whether the thread stands still in a function that waits for other ranks.
        position: changes whenever the thread moves.
        counters: how many operations the rank has started in each of its process groups.
    """

    rank: int
    answered: bool = False
    ended: bool = False
    alive: bool | None = None
    site: str = ""
    inside: str = ""
    waits: bool = False
    position: str = ""
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def gone(self) -> bool:
        """Whether the rank can never come: its program is over, or its process was killed."""
        return self.ended or self.alive is False

    def ahead_of(self, other: dict[str, int]) -> bool | None:
        """Say whether the rank has started an operation that the other has not; None if no group counts."""
        common = self.counters.keys() & other.keys()
        return any(self.counters[group] > other[group] for group in common) if common else None

    def __str__(self) -> str:
        if self.ended:
            return "has ended"
        if self.alive is False:
            return "was killed: its process is gone"
        if not self.answered:
            return "gives no answer" + (", but its process exists" if self.alive else "")
        inside = f", in {self.inside}" if self.inside else ""
        return f"is at {self.site}{inside}" + (", and waits for other ranks there" if self.waits else "")


# -- the training thread of this process ---------------------------------------------------------------------------


def call_site(frame: FrameType | None = None) -> str:
    """Return ``file:line in function`` of the user, outside of torch and this library, and of the script."""
    return _describe(frame or sys._getframe(1))[0]


def counters() -> dict[str, int]:
    """Return how many operations this rank has started in each of its process groups; groups that do not count are left out."""
    found: dict[str, int] = {}
    for group in list(dist.distributed_c10d._world.pg_map) if dist.is_available() else []:
        try:
            # Groups that `split_group` makes have one name and different ranks.
            members = zlib.crc32(repr(dist.get_process_group_ranks(group)).encode())
            for device in group._device_types:
                backend = group._get_backend(device)
                key = f"{backend.name()}:{group.group_name}:{members:x}"
                found[key] = backend._get_sequence_number_for_group()
        except Exception:  # no backend counts by contract, and a group may be destroyed while we ask
            continue
    return found


def _describe(frame: FrameType) -> tuple[str, str]:
    """Return the call site of a stack, and what was called there."""
    below: list[str] = []
    site, site_file, outermost = "", "", frame
    while frame is not None:
        file = frame.f_code.co_filename
        outside = not (file.startswith((_OURS, _TORCH)) or _is_standard(file))
        if outside and not site:
            site, site_file = _line(frame), file
        elif not site:
            below.append(f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}")
        elif outside and any(part in site_file for part in _PACKAGES) and not any(part in file for part in _PACKAGES):
            site = f"{site}, called from {_line(frame)}"
            break
        outermost, frame = frame, frame.f_back
    if not site:  # a script of this library's own
        return _line(outermost), below[0] if below else ""
    return site, " > ".join(dict.fromkeys((below[-1], below[0]))) if below else ""


def _is_standard(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(_LIBRARY) and not any(part in file for part in _PACKAGES))


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _position(frame: FrameType) -> str:
    steps: list[tuple[int, int]] = []
    while frame is not None:
        steps.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return f"{zlib.crc32(repr(steps).encode()):x}-{len(steps)}"


def _sleeps(native: int | None) -> bool:
    """Whether a thread of this process does not run; where that cannot be seen, it is taken to sleep."""
    try:
        stat = Path(f"/proc/self/task/{native}/stat").read_bytes()
    except OSError:
        return True
    return stat.startswith((b"S", b"D"), stat.rfind(b")") + 2)


# -- processes -----------------------------------------------------------------------------------------------------


def _process() -> dict[str, Any]:
    """Describe this process so that others on the machine can look whether it exists."""
    return {"pid": os.getpid(), "machine": _machine(), "started": _status(os.getpid())[1]}


def _machine() -> str:
    """Return a name that two processes share if they see each other's numbers; empty where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _status(pid: int) -> tuple[str, str]:
    """Return the state of a process and when it was started; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return "", ""
    words = stat[stat.rfind(b")") + 2 :].decode().split()
    return words[0], words[19]


def _exists(process: dict[str, Any]) -> bool | None:
    if not process.get("machine") or process["machine"] != _machine():
        return None
    state, started = _status(process["pid"])
    return state not in ("", "Z", "X") and started == process["started"]


# -- the thread ----------------------------------------------------------------------------------------------------


def interval(world_size: int) -> float:
    """Return the seconds between two looks at the store in a run of so many ranks."""
    return max(_INTERVAL_S, world_size / _PER_SECOND)


class Watcher:
    """Answers other ranks' questions about a thread of this process, until the group or the process ends.

    It holds the store weakly: a group that is destroyed must take its store along, as the next may need the port.
    """

    def __init__(self, store: Any, rank: int, world_size: int, thread: threading.Thread | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self._origin = weakref.ref(store)
        self._watched = thread or threading.current_thread()
        self._pid = os.getpid()
        self._clone: Any = None
        self._over = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="accelerate-hang-diagnosis", daemon=True)

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    def serves(self, store: Any) -> bool:
        """Whether this watcher was made in this process for a store."""
        return self._pid == os.getpid() and self._origin() is store

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
        if self._pid != os.getpid() or self._closed or self._thread.is_alive() or self._origin() is None:
            return
        self._closed = True
        try:
            store = self._reach()
            store.set(f"ended/{self.rank}", "")
            left = store.add("left", 1)
            if _holds(self._origin(), self.rank):
                store.add("asked", _CLOSING)
                deadline = time.monotonic() + interval(self.world_size) + _INTERVAL_S
                while left < self.world_size and time.monotonic() < deadline:
                    time.sleep(0.005)
                    left = store.add("left", 0)
        except Exception as error:  # the process that holds the store has ended first
            logger.debug("Rank %d could not leave word that it ends: %s", self.rank, error)

    def _reach(self) -> Any | None:
        """Return the store under this thread's prefix, or None once the group is gone."""
        origin = self._origin()
        if origin is None:
            return None
        if self._clone is None:
            # A connection of its own: one that waits in `store.wait` lets no other request through.
            try:
                clone = origin.clone()
            except Exception:  # older torch, and stores written in Python, have none
                clone = origin
            if clone is origin:
                return dist.PrefixStore(_PREFIX, origin)
            self._clone = clone
        return dist.PrefixStore(_PREFIX, self._clone)

    def _run(self) -> None:
        try:
            self._reach().set(f"process/{self.rank}", json.dumps(_process()))
            answered = 0
            while not self._closed and not self._over.wait(interval(self.world_size)):
                answered = self._answer(answered)
        except Exception as error:  # the store is gone, and with it every rank that could ask
            logger.debug("Rank %d does not answer any longer: %s", self.rank, error)

    def _answer(self, answered: int) -> int:
        """Answer the latest question if there is a new one; return its number."""
        store = self._reach()
        if store is None:
            self._closed = True
            return answered
        asked = store.add("asked", 0)
        if asked >= _CLOSING:
            self._closed = True
            store.add("left", 1)
        elif asked > answered:
            store.set(f"answer/{self.rank}", json.dumps({"question": asked, **self._look()}))
        return asked

    def _look(self) -> dict[str, Any]:
        """Say what the watched thread does; takes a moment, because standing still needs time to show."""
        positions: set[str] = set()
        sleeps = True
        for sample in range(_SAMPLES):
            if sample:
                self._over.wait(_SAMPLE_PAUSE_S)
            frames = sys._current_frames()
            frame = frames.get(self._watched.ident) or frames.get(threading.main_thread().ident)
            del frames
            if frame is None:
                return asdict(RankStatus(self.rank, answered=True, site="a place without Python code"))
            sleeps = sleeps and _sleeps(self._watched.native_id)
            positions.add(_position(frame))
            site, inside = _describe(frame)
            module = frame.f_globals.get("__name__", "")
            del frame  # it keeps all that its function holds
        waits = sleeps and len(positions) == 1 and module.startswith(_WAITING_IN)
        position = positions.pop() if len(positions) == 1 else f"moving-{time.monotonic()}"
        return asdict(RankStatus(self.rank, True, False, None, site, inside, waits, position, counters()))


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
        # The interpreter must not end beside a thread that is in the store: that aborts the process.
        atexit.register(_end)
        if multiprocessing.parent_process() is not None:  # such a process leaves without a look at `atexit`
            multiprocessing_util.Finalize(None, _end, exitpriority=100)


def _end() -> None:
    if _watcher is not None:
        _watcher.end()


# -- asking --------------------------------------------------------------------------------------------------------


class Question:
    """One question to all ranks: where are you? The answers of `ranks` matter."""

    def __init__(self, store: Any, ranks: Collection[int], world_size: int) -> None:
        self._store = dist.PrefixStore(_PREFIX, store)
        self._number = self._store.add("asked", 1)
        self._answers: dict[int, RankStatus] = {}
        self._open = sorted(ranks)
        self._pause = interval(world_size) / 5
        self._next = time.monotonic() + self._pause
        # A look, the samples, and as much again for a busy machine.
        self._deadline = time.monotonic() + 2 * (interval(world_size) + _SAMPLES * _SAMPLE_PAUSE_S)

    def answers(self) -> dict[int, RankStatus] | None:
        """Return what all ranks said, or None as long as some may still answer. Does not wait."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + self._pause
        for rank in list(self._open):
            known = self._read(rank)
            if known.answered or known.gone or now >= self._deadline:
                self._answers[rank] = known
                self._open.remove(rank)
        return None if self._open else self._answers

    def _read(self, rank: int) -> RankStatus:
        if self._store.check([f"ended/{rank}"]):
            return RankStatus(rank, ended=True)
        if self._store.check([f"answer/{rank}"]):
            answer = json.loads(self._store.get(f"answer/{rank}"))
            if answer.pop("question") >= self._number:
                return RankStatus(**answer)
        alive = None
        if self._store.check([f"process/{rank}"]):
            alive = _exists(json.loads(self._store.get(f"process/{rank}")))
        return RankStatus(rank, alive=alive)


# -- slow, waiting in turn, or gone ---------------------------------------------------------------------------------
#
# A wrong guess ends a run, so the evidence must be strong: a rank has ended or was killed; or it stands still in a collective
# that the waiting ranks have not joined. A rank that computes, reads or sleeps is waited for.

# How long a missing rank must stand still in a collective that we have not joined before it is taken for stuck,
STILL_S = 0.9
# ... where the group's backend does not count collectives, so that it may as well wait for a third rank,
STILL_UNCOUNTED_S = 5.0
# ... and where all missing ranks wait, but for nothing that we know of.
STILL_TOGETHER_S = 15.0
# How long a rank may leave questions unanswered if its process cannot be seen from here.
SILENCE_S = 60.0

# These backends count collectives alone; others count point-to-point operations as well, which not all ranks share.
_EXACT_COUNTERS = ("nccl:", "xccl:")
# So who waits in one of these has counted it, and need not wait for us.
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")


@dataclass
class Observation:
    """What has been seen of a missing rank."""

    heard: float
    still_since: float
    latest: RankStatus

    def add(self, now: float, latest: RankStatus) -> None:
        """Note a new answer, or that there is none."""
        if latest.answered:
            self.heard = now
        before = self.latest
        if not latest.answered or (latest.position, latest.counters) != (before.position, before.counters):
            self.still_since = now
        self.latest = latest


class Diagnosis:
    """Finds out where missing ranks are. One of those that wait (`leads`) asks for all of them."""

    def __init__(self, origin: Any, ranks: list[int], world_size: int, leads: bool, again: float) -> None:
        self._origin, self._ranks, self._world_size, self._leads = origin, ranks, world_size, leads
        self.began = self._next = time.monotonic()
        self._again = again
        self._question: Question | None = None
        self.observations = {rank: Observation(self.began, self.began, RankStatus(rank)) for rank in ranks}

    def news(self) -> bool:
        """Go on with the diagnosis; say whether there are new answers. Does not wait."""
        now = time.monotonic()
        if now < self._next or not self._leads:
            return False
        if self._question is None:
            # All of them: to see who is ahead, one has to know where those are that wait here.
            self._question = Question(self._origin, self._ranks, self._world_size)
        answers = self._question.answers()
        if answers is None:
            return False
        now = time.monotonic()
        for rank, answer in answers.items():
            self.observations[rank].add(now, answer)
        self._question, self._next = None, now + self._again
        return True

    def gone(self, ranks: Collection[int]) -> list[int]:
        """Return which of some ranks can never come, or have not been heard of for too long."""
        now = time.monotonic()
        found = []
        for trace in (self.observations[rank] for rank in ranks):
            silent = now - trace.heard > SILENCE_S and not trace.latest.alive
            if trace.latest.gone or silent:
                found.append(trace.latest.rank)
        return found

    def stuck(self, missing: list[int]) -> list[int]:
        """Return which of the missing ranks wait for something that only happens if we go on."""
        here = [trace.latest.counters for rank, trace in self.observations.items() if rank not in missing]
        found = [rank for rank in missing if self._is_stuck(self.observations[rank], here)]
        if not found and all(self._waits(self.observations[rank], STILL_TOGETHER_S) for rank in missing):
            found = missing
        return found

    def _is_stuck(self, trace: Observation, here: list[dict[str, int]]) -> bool:
        if time.monotonic() - trace.still_since < STILL_S:
            return False
        for counters in here:
            exact = {group: count for group, count in counters.items() if group.startswith(_EXACT_COUNTERS)}
            if trace.latest.ahead_of(exact):
                return True  # wherever it stands: on a GPU one waits for a collective in whatever reads its result
        ahead = [answer for counters in here if (answer := trace.latest.ahead_of(counters)) is not None]
        if ahead:
            return any(ahead) and trace.latest.waits and not trace.latest.inside.endswith(_POINT_TO_POINT)
        return self._waits(trace, STILL_UNCOUNTED_S)

    @staticmethod
    def _waits(trace: Observation, seconds: float) -> bool:
        return trace.latest.waits and time.monotonic() - trace.still_since >= seconds
