"""The record of a run's time: a line of JSON for each attempt that is over, and a heartbeat of the attempt under way.

The heartbeat is a file in memory. The kernel keeps what a killed process wrote there, and the next attempt turns it into a line.
"""

import contextlib
import json
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from accelerate.base.table import Report
from accelerate.runtime import failure

CAUSES = (
    "productive",
    "recomputed",
    "save",
    "load",
    "setup",
    "imports",
    "start",
    "failure",
    "down",
    "waiting",
)
# Five integers and three times, then the seconds of each cause; see `Heartbeat`.
_SLOT = struct.Struct(f"<5q3d{len(CAUSES)}d")


@dataclass
class Attempt:
    """One start of the processes.

    Attributes:
        number: Counts the attempts of a run, from 0.
        begin: When the attempt before it ended, or when the launcher started; seconds since 1970.
        end: The moment up to which its time is accounted for.
        step: The optimizer steps that its model has seen, those of loaded checkpoints included.
        furthest: The last step that this attempt or an earlier one has done.
        steps: How many steps it did first.
        recomputed_steps: How many steps it did that an earlier attempt, or itself before a load, had done.
        unfinished: Seconds since the last step, without saves and loads, that no cause has yet.
        seconds: Seconds by cause.
    """

    number: int
    begin: float
    end: float
    step: int = 0
    furthest: int = 0
    steps: int = 0
    recomputed_steps: int = 0
    unfinished: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    def finish(self, cause: str) -> None:
        """Give the time since the last step to a cause; to the set-up if there was no step."""
        self.seconds[cause if self.steps or self.recomputed_steps else "setup"] += self.unfinished
        self.unfinished = 0.0


class Heartbeat:
    """The state of an `Attempt` in a file that is mapped into memory.

    It has two slots, and a byte that names the valid one: a process that is killed in a write leaves the other slot.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
            file.truncate(8 + 2 * _SLOT.size)
            self._map = mmap.mmap(file.fileno(), 0)

    def write(self, attempt: Attempt) -> None:
        """Note the state of an attempt."""
        slot = 1 - self._map[0]
        counts = attempt.number, attempt.step, attempt.furthest, attempt.steps, attempt.recomputed_steps
        times = attempt.begin, attempt.end, attempt.unfinished
        _SLOT.pack_into(self._map, 8 + slot * _SLOT.size, *counts, *times, *attempt.seconds.values())
        self._map[0] = slot

    def close(self) -> None:
        """Remove the file: its attempt has a line now."""
        self._map.close()
        os.remove(self._path)

    @staticmethod
    def read(path: str) -> Attempt | None:
        """Return the attempt of a file; None if there is no file, or no process has written to it."""
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        if len(data) != 8 + 2 * _SLOT.size or data[0] > 1:
            return None
        number, step, furthest, steps, recomputed, begin, end, unfinished, *seconds = _SLOT.unpack_from(
            data, 8 + data[0] * _SLOT.size
        )
        by_cause = dict(zip(CAUSES, seconds, strict=True))
        attempt = Attempt(number, begin, end, step, furthest, steps, recomputed, unfinished, by_cause)
        return attempt if begin else None


class Record:
    """The attempts of a run in a file of JSON lines; one process writes to it.

    Attributes:
        path: The file.
        attempts: The attempts that are over, the first one first.
    """

    def __init__(self, path: str) -> None:
        self.path, self.attempts = path, read_lines(path)
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        if (killed := _killed(path, self.attempts)) is not None:
            self.append(killed)

    def append(self, attempt: Attempt) -> None:
        """Add an attempt that is over."""
        self.attempts.append(attempt)
        with open(self.path, "ab", buffering=0) as file:
            file.write(json.dumps(asdict(attempt)).encode() + b"\n")

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat of the next attempt."""
        return Heartbeat(_beside(self.path))


def _beside(path: str) -> str:
    return f"{path}.now"


def _killed(path: str, attempts: Sequence[Attempt]) -> Attempt | None:
    """Return the attempt that has left a heartbeat and no line."""
    attempt = Heartbeat.read(_beside(path))
    if attempt is None or attempt.number < len(attempts):
        return None
    attempt.number = len(attempts)  # lines are lost where a machine failed
    attempt.finish("failure")
    return attempt


def read_lines(path: str) -> list[Attempt]:
    """Return the attempts of a file, of which there need be none; cut off a last line that is not complete.

    Raises:
        ValueError: A line is not an attempt.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return []
    complete = data.rfind(b"\n") + 1
    if complete < len(data):  # the machine failed while the line was written
        os.truncate(path, complete)
    attempts = []
    for number, line in enumerate(data[:complete].splitlines()):
        try:
            attempt = Attempt(**json.loads(line))
            if attempt.number != number or set(attempt.seconds) != set(CAUSES):
                raise ValueError(f"it should be attempt {number}, with seconds for {', '.join(CAUSES)}")
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"Line {number + 1} of {path!r} is not an attempt of a run: {error}. Name another file, or move this one away."
            ) from None
        attempts.append(attempt)
    return attempts


# -- clocks --------------------------------------------------------------------------------------------------------------


def started(pid: int) -> float:
    """Return when a process of this machine started, in seconds since 1970."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError):  # not Linux
        import psutil

        return float(psutil.Process(pid).create_time())


def launcher_started() -> float | None:
    """Return when the launcher of this process started; None without one."""
    with contextlib.suppress(Exception):  # no variable, or a process that this one may not look at
        return started(int(os.environ[failure.LAUNCHER]))
    return None


# -- the report ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GoodputRow:
    """The time of one cause, as seconds and as a share of the wall time."""

    cause: str
    seconds: float
    share: float

    def cells(self) -> list[str]:
        """Return the row as text."""
        return [self.cause, f"{self.seconds:,.2f}", f"{self.share:.1%}"]


@dataclass(frozen=True)
class GoodputReport(Report):
    """The wall time of a run by cause, over all its attempts; printed as a table.

    Attributes:
        seconds: Seconds by cause; their sum is `wall`.
        attempts: How many times the processes have started.
        steps: Optimizer steps without repetitions.
        recomputed_steps: Steps that were done again.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    attempts: int = 0
    steps: int = 0
    recomputed_steps: int = 0

    @property
    def wall(self) -> float:
        """Seconds since the launcher of the first attempt started."""
        return sum(self.seconds.values())

    @property
    def fraction(self) -> float:
        """The share of the wall time in which steps were done for the first time."""
        return self.seconds["productive"] / self.wall

    def values(self) -> dict[str, float]:
        """Return numbers for trackers."""
        counts = {name: getattr(self, name) for name in ("fraction", "attempts", "steps", "recomputed_steps")}
        times = {f"{cause}_seconds": seconds for cause, seconds in self.seconds.items()}
        return {f"goodput/{name}": number for name, number in (counts | times).items()}


def report_of(attempts: Sequence[Attempt]) -> GoodputReport:
    """Return the report of a run's attempts."""
    seconds = {cause: sum(attempt.seconds[cause] for attempt in attempts) for cause in CAUSES}
    wall = sum(seconds.values())
    rows = tuple(GoodputRow(cause, amount, amount / wall) for cause, amount in seconds.items() if amount)
    steps, recomputed = (sum(getattr(attempt, name) for attempt in attempts) for name in ("steps", "recomputed_steps"))
    title = f"Goodput {seconds['productive'] / wall:.1%} of {wall:,.1f} s: {steps} steps in {len(attempts)} attempt(s)"
    notes = (f"{recomputed} steps were done again.",) if recomputed else ()
    counts = {"attempts": len(attempts), "steps": steps, "recomputed_steps": recomputed}
    return GoodputReport(title, ("cause", "seconds", "share"), rows, notes, 1, seconds=seconds, **counts)
