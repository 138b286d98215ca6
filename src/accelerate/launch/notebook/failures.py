"""How processes that were started have failed: what they write down, in which order it happened, what their caller sees."""

import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

# A process that ends with one of these was ended by the system, or by its own machine code.
_SUDDEN = {
    getattr(signal, name) for name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE") if hasattr(signal, name)
}
_HINTS = {
    "SIGKILL": "The system does that when memory runs out: ask for less (a smaller batch, fewer workers of loaders), and look "
    "into the system's log. Somebody may have killed it, too.",
    "SIGSEGV": "That is a fault in machine code: of a library, not of the function.",
    "SIGBUS": "A full /dev/shm does that: give the container more shared memory, or loaders fewer workers.",
}
_POISONED = ("Cannot re-initialize", "CUDA error: initialization error", "in forked subprocess")
_LIMIT = 30_000


@dataclass(frozen=True)
class WorkerFailure:
    """How one process has failed.

    Attributes:
        rank: its number among all processes.
        pid: its process id.
        exitcode: its exit status; minus the number of the signal that killed it; None if it was not seen.
        traceback: the traceback of its error, or None if it left none.
        time: when, in seconds since 1970, or None.
    """

    rank: int
    pid: int
    exitcode: int | None = None
    traceback: str | None = None
    time: float | None = None

    @property
    def signal(self) -> str | None:
        """The name of the signal that killed it, or None."""
        if self.exitcode is None or self.exitcode >= 0:
            return None
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return f"signal {-self.exitcode}"

    def describe(self) -> str:
        """Return what happened, in a line or with the traceback."""
        if self.traceback is not None:
            return self.traceback
        if self.signal is not None:
            hint = _HINTS.get(self.signal)
            return f"The process {self.pid} was killed by {self.signal}.{' ' + hint if hint else ''}"
        early = ", before its function was done" if self.exitcode == 0 else ""
        return f"The process {self.pid} ended with exit status {self.exitcode}{early}, and left no traceback."

    @property
    def summary(self) -> str:
        """What happened, in a few words."""
        if self.traceback is not None:
            last = self.traceback.strip().rpartition("\n")[2]
            return last if len(last) <= 200 else f"{last[:200]}..."
        return f"killed by {self.signal}" if self.signal else f"exit status {self.exitcode}"


class WorkerError(RuntimeError):
    """A process that was started has failed; the message holds its traceback.

    Attributes:
        failures: all failures of this machine that are known, the first one first.
        rank: the number of the process that failed first.
        exitcode: its exit status; minus the number of the signal that killed it.
        traceback: its traceback, or None where it was killed.
    """

    def __init__(self, message: str, failures: tuple[WorkerFailure, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures
        first = failures[0] if failures else None
        self.rank = first.rank if first else None
        self.exitcode = first.exitcode if first else None
        self.traceback = first.traceback if first else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.failures)

    def _render_traceback_(self, *_: Any) -> list[str]:
        # IPython asks for this: in a cell, the frames of the launcher would only hide those of the worker.
        return [f"{type(self).__name__}: {self}"]


def build(name: str, failures: tuple[WorkerFailure, ...], hint: str = "") -> WorkerError:
    """Return the error for the one who started the processes.

    Args:
        name: of the function that they ran.
        failures: the first one first; at least one.
        hint: a sentence that goes behind the traceback.
    """
    first, *others = failures
    lines = [f"Rank {first.rank} failed in {name}:", "", first.describe().rstrip()]
    if any(text in (first.traceback or "") for text in _POISONED):
        lines += [
            "",
            "The GPU was used before the processes were forked. Restart, and use it only inside the function.",
        ]
    if others:
        lines += ["", "Others failed as well, which may follow from it:"]
        lines += [f"  rank {failure.rank}: {failure.summary}" for failure in others]
    if hint:
        lines += ["", hint]
    return WorkerError("\n".join(lines), failures)


def write(directory: str, error: BaseException, own: TracebackType | None, rank: int | None = None) -> None:
    """Write down, in a process that fails, why it does.

    Args:
        directory: where the processes of the run write.
        error: the error.
        own: the traceback below the launcher's own frames.
        rank: of the process; None is what the environment says.
    """
    environ = {**os.environ, **({} if rank is None else {"RANK": str(rank)})}
    text = "".join(traceback.format_exception(type(error), error, own))
    if len(text) > _LIMIT:
        text = f"{text[: _LIMIT // 3]}\n... ({len(text) - _LIMIT} characters left out) ...\n{text[-2 * _LIMIT // 3 :]}"
    failure = WorkerFailure(int(environ.get("RANK", "0")), os.getpid(), None, text, time.time())
    with contextlib.suppress(OSError):  # a full disk must not hide the error itself
        path = Path(directory, _file_name(environ))
        path.write_text(json.dumps(asdict(failure)), "utf-8", errors="backslashreplace")


def _file_name(environ: Mapping[str, str]) -> str:
    return f"failure-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{environ.get('RANK', '0')}.json"


def written(directory: str, attempt: str = "0") -> list[WorkerFailure]:
    """Return what processes wrote down.

    Args:
        directory: where the processes of the run write.
        attempt: how often they had been restarted.
    """
    found = []
    for path in Path(directory).glob(f"failure-{attempt}-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # half a file of a process that was killed
            found.append(WorkerFailure(**json.loads(path.read_text("utf-8"))))
    return sorted(found, key=_order)


class Endings:
    """The processes of the last attempt, and how those ended that ended by themselves."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self._environs: Mapping[int, Mapping[str, str]] = {}
        self._failed: dict[int, WorkerFailure] = {}

    def look(self, context: Any) -> None:
        """Look at torch's processes, before torch does so and, if one has failed, stops the others.

        Args:
            context: a `torch.distributed.elastic.multiprocessing.api.MultiprocessContext`.
        """
        started = getattr(context, "_pc", None)
        if started is None:
            return
        self.processes, self._environs, self._failed = list(started.processes), context.envs, {}
        for local, process in enumerate(self.processes):
            if not process.is_alive() and process.exitcode:
                rank = int(context.envs[local]["RANK"])
                self._failed[rank] = WorkerFailure(rank, process.pid, process.exitcode)

    def failures(self, directory: str, reported: tuple[WorkerFailure, ...] = ()) -> tuple[WorkerFailure, ...]:
        """Return who failed by itself, the first one first.

        Args:
            directory: where the processes of the run write.
            reported: what torch says.
        """
        attempt = self._environs[0].get("TORCHELASTIC_RESTART_COUNT", "0") if self._environs else "0"
        # A process may have been stopped by torch while it was failing, and have failed first all the same.
        found = {failure.rank: failure for failure in written(directory, attempt)}
        for failure in (*reported, *self._failed.values()):
            known = found.get(failure.rank)
            more = (known.traceback, known.time) if known else ()
            found[failure.rank] = WorkerFailure(failure.rank, failure.pid, failure.exitcode, *more)
        return tuple(sorted(found.values(), key=_order))


def _order(failure: WorkerFailure) -> tuple[int, float, int]:
    # Whoever vanished was not asked for the time; the others' errors (a connection that broke) follow from it. A process that
    # aborts does so because of others, as a rule.
    sudden = failure.traceback is None and failure.exitcode is not None and -failure.exitcode in _SUDDEN
    return (0 if sudden else 1 if failure.time is not None else 2, failure.time or 0.0, failure.rank)
