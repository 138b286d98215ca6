"""What goes wrong: the errors of a launch, and the one reporter of failed ranks, for one machine, several machines and notebooks.

The reporter decides which rank failed first, shows that rank's traceback once, adds a line for the others, and derives the exit
status.
"""

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.base._warn import printable
from accelerate.runtime.failure import OURS, PREEMPTED

PREFIX = "accelerate launch: "
_SAVED = f"the run ended with exit status {PREEMPTED}: a signal came, and it has saved itself. Start it again."
# What torch says on the ranks that are left when one goes: gloo, the key-value store, NCCL, and our own checks.
_LEFT_ALONE = re.compile(
    r"Connection (closed|reset) by peer|Connection refused.*gloo|Broken pipe|failed to recv, got 0 bytes|"
    r"DistNetworkError|remote process exited|ncclRemoteError|rank \d+ (has ended|was killed)",
    re.I,
)


class LaunchError(ValueError):
    """The request cannot be run as written; the command line answers it with one line and exit status 2."""


class MissingPackageError(LaunchError, ModuleNotFoundError):
    """A package that the request needs is not installed."""


class RunError(RuntimeError):
    """A run has begun and cannot continue for a reason that lies outside the script; the command line answers with `status`."""

    status = 1


# -- how ranks end -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerFailure:
    """How one rank failed.

    Attributes:
        exitcode: its exit status; minus the number of the signal that killed it.
        record: what it left in its error file, see `accelerate.runtime.failure.record`; empty if it left nothing.
        time: when, in seconds since 1970, as well as that is known.
        stopped: it was alive when the launcher began to stop all ranks.
        fault: where its threads stood when the system killed it, as after a segmentation fault.
    """

    rank: int
    pid: int
    exitcode: int
    record: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0
    stopped: bool = False
    fault: str = ""

    @property
    def traceback(self) -> str | None:
        """The traceback of its error, or None if it left none."""
        return self.record.get("traceback") or None

    @property
    def signal(self) -> str | None:
        """The name of the signal that killed it, or None."""
        return _signal(-self.exitcode) if self.exitcode < 0 else None

    @property
    def status(self) -> int:
        """The exit status as a shell counts it."""
        return _status(self._code)

    @property
    def words(self) -> str:
        """How it ended, in words."""
        return _ending(self._code)

    @property
    def _code(self) -> int:
        # A rank that had failed and was slow to end was stopped by the launcher: its own error counts, not the signal.
        stopped_after_error = self.exitcode == -signal.SIGTERM and self.record
        return self.record.get("status", 1) if stopped_after_error else self.exitcode

    @property
    def own(self) -> bool:
        """Whether it ended without a signal of the launcher."""
        return not self.stopped or bool(self.record)

    @property
    def _order(self) -> tuple[Any, ...]:
        # Libraries abort a process whose peer is gone, and leave no message of ours.
        aborted = self.exitcode == -signal.SIGABRT
        return not self.own, follows(self.record), aborted, self.time, self.rank


def follows(record: Mapping[str, Any]) -> bool:
    """Return whether the record of a rank says that it failed because another one was gone."""
    return bool(_LEFT_ALONE.search(record.get("traceback", "")))


def endings_of(failures: Mapping[int, Any]) -> list[WorkerFailure]:
    """Return how the ranks ended, the one that failed first at the beginning; `failures` are torch's, by rank.

    A rank that failed because another one was gone comes after those that did not, whatever the clock says. The agent
    has added when each was first seen dead (`died`; None: alive when the agent stopped all ranks) and where its
    threads stood (`fault`).
    """
    found = []
    for rank, failure in failures.items():
        died = getattr(failure, "died", failure.timestamp)
        data = failure.error_file_data
        record = data.get(OURS) if isinstance(data, dict) else None
        record = record if isinstance(record, dict) else {}
        time, fault = record.get("time") or float(died or 0), getattr(failure, "fault", "")
        found.append(WorkerFailure(rank, failure.pid, failure.exitcode, record, time, died is None, fault))
    return sorted(found, key=lambda one: one._order)


def failure_of(error: BaseException) -> tuple[int, str]:
    """Turn the failure of a run into an exit status, as a shell counts it, and a line for the user.

    An error that does not come from a process that was started is raised again.
    """
    if (code := getattr(error, "returncode", None)) is not None:  # a subprocess.CalledProcessError
        return (PREEMPTED, _SAVED) if code == PREEMPTED else (_status(code), f"the script {_ending(code)}.")
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, "interrupted."
    if (number := getattr(error, "sigval", None)) is not None:
        return 128 + int(number), f"stopped by {_signal(number)}; all processes are gone."
    if not isinstance(getattr(error, "failures", None), Mapping):
        raise error
    first = endings_of(error.failures)[0]
    if first.exitcode == PREEMPTED:
        return PREEMPTED, _SAVED
    above = "its traceback stands above" if first.record or first.fault else "its own messages stand above"
    return first.status, f"rank {first.rank} (pid {first.pid}) {first.words}; {above}. --debug prints torch's report."


# -- the reporter ------------------------------------------------------------------------------------------------------


class Reporter:
    """Reports what happens to the processes of a run; a quiet one prints the tracebacks alone."""

    def __init__(self, quiet: bool = False, write: Callable | None = None) -> None:
        self._quiet, self._write = quiet, write or to_stderr
        self._shown: set[int] = set()

    def tell(self, *lines: str) -> None:
        """Print lines of information, to which this adds a prefix."""
        if not self._quiet:
            self._write("".join(f"{PREFIX}{printable(line)}\n" for line in lines))

    def started(self, attempt: int, attempts: int) -> None:
        """Report a start of all processes: which of how many."""
        self._shown.clear()
        if attempt > 1:
            self.tell(f"all processes start again: attempt {attempt} of {attempts}.")

    def lingers(self, rank: int, record: Mapping[str, Any]) -> None:
        """Report a process that has left a record in its error file, and does not end."""
        self._show(WorkerFailure(rank, record.get("pid", 0), 1, record), "has failed, and does not end")

    def failed(self, failures: Mapping[int, Any], attempt: int, attempts: int) -> None:
        """Report that all processes of an attempt (from 1) are gone, because some have failed; see `endings_of`."""
        endings = endings_of(failures)
        first = endings[0]
        if first.exitcode == PREEMPTED:
            return
        self._show(first, "failed" + (f" in attempt {attempt} of {attempts}" if attempts > 1 else ""))
        self.tell(*self.about(endings))
        if attempt < attempts:
            self.tell(f"rank {first.rank} (pid {first.pid}) {first.words}.")

    @staticmethod
    def about(endings: list[WorkerFailure]) -> list[str]:
        """Return a line for each group of ranks next to the first failure, and why the system may have killed it."""
        first, *others = endings
        groups: dict[str, list[int]] = {}
        for ending in others:
            groups.setdefault(_beside(first, ending), []).append(ending.rank)
        lines = [f"{_ranks(ranks)} {words}" for words, ranks in groups.items()]
        if first.signal == "SIGKILL":
            cause = "the kernel did that because memory ran out, or another program"
            lines.append(f"rank {first.rank} was killed by SIGKILL: {cause}; the launcher did not.")
        return lines

    def stopping(self, number: int, grace: float) -> None:
        """Report a signal that ends the run, and how many seconds the processes have."""
        again = "; Ctrl-C again kills them" if number == signal.SIGINT else ""
        self.tell(f"{_signal(number)} came: the processes have {grace:g} s to end{again}.")

    def _show(self, ending: WorkerFailure, how: str) -> None:
        """Print the traceback of a rank, once."""
        if ending.rank not in self._shown and not ending.record.get("shown"):
            parts = [part.rstrip("\n") for part in (ending.fault, ending.traceback) if part]
            if parts:
                host = f" on {ending.record['host']}" if ending.record.get("host") else ""
                self.tell(f"rank {ending.rank}{host} {how}:")
                self._write(printable("\n".join(parts)) + "\n")
        self._shown.add(ending.rank)


def _beside(first: WorkerFailure, ending: WorkerFailure) -> str:
    """Say how a rank ended, in the light of the one that failed first."""
    if not ending.own:
        return "ended because the launcher stopped the run."
    summary = ending.record.get("summary", "")
    if not summary:
        return f"{_ending(ending.exitcode)}."
    if summary == first.record.get("summary"):
        return "failed with the same error."
    last = summary.splitlines()[-1]
    if follows(ending.record) and not follows(first.record):
        return f"failed because another rank had gone: {last}"
    return f"failed as well, with another error: {last} ({ending.record.get('where', '')})"


def _ranks(ranks: Iterable[int]) -> str:
    """Name ranks: `rank 3`, `ranks 1, 2, 7`."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"{'rank' if len(names) == 1 else 'ranks'} {', '.join(names)}"


def to_stderr(text: str) -> None:
    """Write whole lines to standard error. That it is closed, or its disk full, is no reason to end a run."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(printable(text))
            sys.stderr.flush()


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ending(code: int) -> str:
    return f"failed with exit status {code}" if code >= 0 else f"was killed by {_signal(-code)}"
