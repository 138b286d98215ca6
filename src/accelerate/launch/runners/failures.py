"""What a failed run means for the one who started it: whose traceback is shown, an exit status, and a line for each rank."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch.runners import memory
from accelerate.runtime.failure import OURS

_SAVED = (
    f"the run ended with exit status {PREEMPTED}: a signal came, and it has saved itself. Start it again to go on."
)
PREFIX = "accelerate launch: "
# What torch says on the ranks that are left when one goes: gloo, the key-value store, NCCL, and our own checks.
_LEFT_ALONE = re.compile(
    r"Connection (closed|reset) by peer|Connection refused.*gloo|Broken pipe|failed to recv, got 0 bytes|"
    r"DistNetworkError|remote process exited|ncclRemoteError|rank \d+ (has ended|was killed)",
    re.I,
)


@dataclass(frozen=True)
class Ending:
    """How one rank ended that did not succeed.

    Attributes:
        rank: the rank.
        pid: its process.
        code: its exit status; negative for the signal that killed it.
        told: what it left in its error file, see `accelerate.runtime.failure.record`.
        time: when, as well as that is known.
        stopped: it was alive when the launcher began to stop all of them.
        fault: where its threads stood when the system killed it.
    """

    rank: int
    pid: int
    code: int
    told: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0
    stopped: bool = False
    fault: str = ""

    @property
    def status(self) -> int:
        """The exit status as a shell counts it."""
        if self.code == -signal.SIGTERM and self.told and not self.told.get("interrupt"):
            return 1  # it had failed already, and was on its way out when it was stopped
        return _status(self.code)

    @property
    def follows(self) -> bool:
        """Whether it failed because another rank had gone."""
        return follows(self.told)

    @property
    def own(self) -> bool:
        """Whether it ended by itself."""
        return not self.stopped or bool(self.told)

    @property
    def words(self) -> str:
        """How it ended, in words."""
        if self.code == -signal.SIGTERM and self.told:
            return "failed with exit status 1"
        return _ending(self.code)


def follows(told: Mapping[str, Any]) -> bool:
    """Return whether a rank has failed because another one had gone.

    Args:
        told: what it left in its error file; empty for one that left nothing.
    """
    return bool(_LEFT_ALONE.search(told.get("traceback", "")))


def endings_of(failures: Mapping[int, Any]) -> list[Ending]:
    """Return how the ranks ended, the one that failed first at the beginning.

    Whoever failed because another one had gone comes after those that did not, whatever the clock says: a process that is killed
    leaves no time.

    Args:
        failures: by rank, torch's `ProcessFailure`; our agent has written beside what it saw (`Seen`).
    """
    found = []
    for rank, failure in failures.items():
        seen = getattr(failure, "seen", None) or Seen()
        told = (
            failure.error_file_data.get(OURS) if isinstance(getattr(failure, "error_file_data", None), dict) else None
        )
        told = told if isinstance(told, dict) else {}
        time = told.get("time") or seen.time or float(getattr(failure, "timestamp", 0) or 0)
        found.append(Ending(rank, failure.pid, failure.exitcode, told, time, seen.stopped, seen.fault))
    return sorted(found, key=lambda e: (not e.own, e.follows, e.time, e.rank))


@dataclass(frozen=True)
class Seen:
    """What the agent saw of a rank's end.

    Attributes:
        time: when it was last seen alive, or first seen dead if it left in an orderly way.
        stopped: it was alive when the agent began to stop all ranks.
        fault: what it wrote when the system killed it for a fault of its own.
    """

    time: float = 0.0
    stopped: bool = False
    fault: str = ""


def failure_of(error: BaseException) -> tuple[int, str]:
    """Turn the failure of a run into an exit status and a line for people.

    Args:
        error: what `run` raised.

    Returns:
        The exit status of the process that failed first (128 plus the number of the signal that killed it), and which
        process that was.

    Raises:
        BaseException: the error itself, if it does not come from a process that was started.
    """
    if isinstance(error, subprocess.CalledProcessError):
        if error.returncode == PREEMPTED:
            return PREEMPTED, _SAVED
        return _status(error.returncode), f"the script {_ending(error.returncode)}."
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, "interrupted."
    if (number := getattr(error, "sigval", None)) is not None:
        return 128 + int(number), f"stopped by {_name(int(number))}; all processes are gone."
    if isinstance(getattr(error, "failures", None), Mapping):
        first = endings_of(error.failures)[0]
        if first.code == PREEMPTED:
            return PREEMPTED, _SAVED
        above = "its traceback stands above" if first.told or first.fault else "its own messages stand above"
        return (
            first.status,
            f"rank {first.rank} (pid {first.pid}) {first.words}; {above}. --debug prints torch's report.",
        )
    raise error


class Reporter:
    """Tells people what happens to the processes while they run.

    Args:
        quiet: print tracebacks alone, which the processes would have printed.
        write: takes each piece of text; standard error by default.
        keeps_logs: the files of the processes' output stay when the run is over.
    """

    def __init__(
        self, quiet: bool = False, write: Callable[[str], Any] | None = None, keeps_logs: bool = True
    ) -> None:
        self._keeps_logs = keeps_logs
        self._quiet, self._write = quiet, write or to_stderr
        self._kills = memory.kills()
        self._shown: set[int] = set()

    def tell(self, *lines: str) -> None:
        """Print lines of information.

        Args:
            lines: the lines, without a prefix.
        """
        if not self._quiet:
            self._write("".join(f"{PREFIX}{line}\n" for line in lines))

    def started(self, attempt: int, attempts: int, folder: str | None) -> None:
        """The processes run.

        Args:
            attempt: which start this is, from 1.
            attempts: how many there may be.
            folder: where the files of their output are, if there are any.
        """
        self._shown.clear()
        if attempt > 1:
            self.tell(f"all processes start again: attempt {attempt} of {attempts}.")
        if folder and self._keeps_logs:
            self.tell(f"the output of local rank N is copied to {folder}, folder N.")

    def lingers(self, rank: int, told: Mapping[str, Any]) -> None:
        """A process has failed and does not end.

        Args:
            rank: its rank.
            told: what it left in its error file.
        """
        self._show(Ending(rank, told.get("pid", 0), 1, told), "has failed, and does not end")

    def failed(self, failures: Mapping[int, Any], attempt: int, attempts: int) -> None:
        """All processes of an attempt are gone, because some have failed.

        Args:
            failures: as in `endings_of`.
            attempt: which start this was, from 1.
            attempts: how many there may be; after the last one the caller ends with `failure_of`.
        """
        first, *others = endings_of(failures)
        if first.code == PREEMPTED:
            return
        self._show(first, "failed" + (f" in attempt {attempt} of {attempts}" if attempts > 1 else ""))
        self.tell(*self._about(first, others))
        if attempt < attempts:
            self.tell(f"rank {first.rank} (pid {first.pid}) {first.words}.")

    def stopping(self, number: int, grace: float) -> None:
        """A signal came that ends the run.

        Args:
            number: the signal.
            grace: how long the processes have, in seconds.
        """
        again = "; Ctrl-C again kills them" if number == signal.SIGINT else ""
        self.tell(f"{_name(number)} came: the processes have {grace:g} s to end{again}.")

    def interrupted(self, told: Mapping[int, Mapping[str, Any]]) -> None:
        """All processes are gone after Ctrl-C.

        Args:
            told: by rank, what they left in their error files.
        """
        where = {rank: record["where"] for rank, record in sorted(told.items()) if record.get("where")}
        for place in dict.fromkeys(where.values()):
            self.tell(f"{_ranks(rank for rank in where if where[rank] == place)} stood at {place}.")

    def _show(self, ending: Ending, how: str) -> None:
        """Print the traceback of a rank, once."""
        if ending.rank not in self._shown and not ending.told.get("shown"):
            text = ending.told.get("traceback", "")
            if text or ending.fault:
                host = f" on {ending.told['host']}" if ending.told.get("host") else ""
                self.tell(f"rank {ending.rank}{host} {how}:")
                self._write("\n".join(part.rstrip("\n") for part in (ending.fault, text) if part) + "\n")
        self._shown.add(ending.rank)

    def _about(self, first: Ending, others: Iterable[Ending]) -> list[str]:
        groups: dict[str, list[int]] = {}
        for ending in others:
            groups.setdefault(_beside(first, ending), []).append(ending.rank)
        lines = [f"{_ranks(ranks)} {words}" for words, ranks in groups.items()]
        if first.code == -getattr(signal, "SIGKILL", 9):
            lines.append(f"rank {first.rank} was killed by SIGKILL: {memory.reason(self._kills)}.")
        return lines


def _beside(first: Ending, ending: Ending) -> str:
    """Say how a rank ended, in the light of the one that failed first."""
    if not ending.own:
        return "ended because the launcher stopped the run."
    summary = ending.told.get("summary", "")
    if summary and summary == first.told.get("summary"):
        return "failed with the same error."
    if not summary:
        return f"{_ending(ending.code)}."
    last = summary.splitlines()[-1]
    if ending.follows and not first.follows:
        return f"failed because another rank had gone: {last}"
    return f"failed as well, with another error: {last} ({ending.told.get('where', '')})"


def _ranks(ranks: Iterable[int]) -> str:
    """Name ranks: `rank 3`, `ranks 1-3, 7`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    names = ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
    return f"rank{'s' if sum(map(len, parts)) > 1 else ''} {names}"


def to_stderr(text: str) -> None:
    """Write to standard error. That it is closed, or its disk full, is no reason to end a run.

    Args:
        text: whole lines.
    """
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ending(code: int) -> str:
    return f"failed with exit status {code}" if code >= 0 else f"was killed by {_name(-code)}"
