"""Where a process is killed, or refused by its file system, and how its parent learns how far it had come.

A process that saves and loads goes through hundreds of calls of the operating system. `Points` counts them, by phase, and at the
one that its `Plan` names the process kills itself, or the call fails as it does on a full or a broken disk.
"""

import builtins
import contextlib
import ctypes
import errno
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from accelerate.checkpoint import manifest, save, storage
from accelerate.training import saving

PHASES = ("save", "publish", "prune", "load")
_NUMBERS = ("begun", "saved", "loaded", "phase", "fired", "refused", "whole", *PHASES)

CHANGING = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "write", "fsync")
READING = ("pread", "listdir")


class Board:
    """Numbers in memory that a parent shares with its forks, so that they outlive the writer.

    begun: the last step whose save was called; saved: the last one whose checkpoint was there when the save returned; loaded:
    the step of what was loaded; phase: 1 + the index of the phase, or 0; fired: the injected failure came up; refused: a save
    or a load raised; whole: checkpoints that were verified; and the calls counted in each phase.
    """

    def __init__(self, ranks: int = 2) -> None:
        self._cells = memoryview(mmap.mmap(-1, 8 * ranks * len(_NUMBERS))).cast("q")

    def __getitem__(self, key: tuple[str, int]) -> int:
        return self._cells[self._index(*key)]

    def __setitem__(self, key: tuple[str, int], value: int) -> None:
        self._cells[self._index(*key)] = value

    @staticmethod
    def _index(name: str, rank: int) -> int:
        return rank * len(_NUMBERS) + _NUMBERS.index(name)

    def phase(self, rank: int) -> str:
        number = self["phase", rank]
        return PHASES[number - 1] if number else "between"


@dataclass(frozen=True)
class Plan:
    """What happens to one rank of a run."""

    kind: str = "none"  # or "kill", at a call, or "fail", at a call
    phase: str = "save"  # whose calls are counted
    number: int = 0  # which call, from 1
    after: bool = False  # the process is killed when the call is done, not before
    error: int = errno.ENOSPC  # what the failing call raises
    lasts: bool = False  # later calls of the phase fail, too, until the save or the load has raised
    rank: int = 0
    exchanges: bool = True  # the file system can exchange two folders in one step
    safe: bool = True  # weights are written as safetensors
    leaves: bool = True  # what remains of the run is killed at once, or ends when a call failed; else it continues


class Points:
    """Counts the calls of this process on a board, and carries out the plan; None for a process to which nothing happens."""

    def __init__(self, board: Board, rank: int, plan: Plan | None) -> None:
        self.board, self.rank, self.plan = board, rank, plan
        self._lock = threading.Lock()
        self._active = dict.fromkeys(PHASES, 0)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what happens meanwhile, in any thread, as part of a phase; one that is in another one counts alone."""
        self._enter(phase, 1)
        try:
            yield
        finally:
            self._enter(phase, -1)

    def _enter(self, phase: str, change: int) -> None:
        with self._lock:
            self._active[phase] += change
            current = next((phase for phase in ("prune", "publish", "save", "load") if self._active[phase]), None)
            self.board["phase", self.rank] = 0 if current is None else 1 + PHASES.index(current)

    def install(self, exchanges: bool) -> None:
        """Watch every call from now on. Only for a process that is about to end: nothing undoes it."""
        for name in (*CHANGING, *READING):
            setattr(os, name, self._watched(name, getattr(os, name)))
        os.open = self._watched("open", os.open, lambda path, flags, *rest, **more: bool(flags & os.O_CREAT))
        for module in (manifest, storage):
            module.open = self._watched("open", builtins.open, lambda path, mode="r", *rest, **more: "w" in mode)
        storage.exchange = self._watched("exchange", storage.exchange if exchanges else lambda left, right: False)
        for owner, name, phase in (
            (save.Save, "begin", "save"),
            (save.Save, "finish", "save"),
            (save.Save, "_publish", "publish"),
            (storage.LocalStorage, "discard", "publish"),  # removes what the publish has replaced
            (saving, "prune", "prune"),
        ):
            setattr(owner, name, self._phased(getattr(owner, name), phase))

    def _phased(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def phased(*args: Any, **options: Any) -> Any:
            with self.during(phase):
                return function(*args, **options)

        return phased

    def _watched(
        self, name: str, function: Callable[..., Any], changes: Callable[..., bool] | None = None
    ) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            number = self.board["phase", self.rank]
            if not number:
                return function(*args, **options)
            phase = PHASES[number - 1]
            with self._lock:
                self.board[phase, self.rank] += 1
                count = self.board[phase, self.rank]
            plan = self.plan
            if plan is None or plan.phase != phase or count < plan.number:
                return function(*args, **options)
            if plan.kind == "kill" and count == plan.number:
                if plan.after:
                    function(*args, **options)
                os.kill(os.getpid(), signal.SIGKILL)  # nothing is run, flushed or removed
            if plan.kind == "fail" and (plan.lasts or not self.board["fired", self.rank]):
                writes = changes(*args, **options) if changes is not None else name in (*CHANGING, "exchange")
                if writes or phase == "load":
                    return self._fail(name, plan, function, args)
            return function(*args, **options)

        return call

    def _fail(self, name: str, plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        self.board["fired", self.rank] = 1
        if name == "exchange":  # it tells by its answer
            return False
        if name == "write" and len(args[1]) > 1:  # a disk takes what still fits
            function(args[0], memoryview(args[1])[: len(args[1]) // 2])
        where = [args[0]] if args and isinstance(args[0], (str, os.PathLike)) else []
        raise OSError(plan.error, os.strerror(plan.error), *where)


_PR_SET_PDEATHSIG, _CLONE_NEWNS, _CLONE_NEWUSER, _MS_REC, _MS_PRIVATE = 1, 0x20000, 0x10000000, 0x4000, 0x40000


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def mount_small_disk(folder: str, size: int) -> None:
    """Mount a file system of so many bytes, which only this process and its children see; an OSError where a user may not."""
    library = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *args: Any) -> None:
        if getattr(library, name)(*args) != 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    call("unshare", _CLONE_NEWNS | (0 if os.geteuid() == 0 else _CLONE_NEWUSER))
    call("mount", None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), f"size={size}".encode())
