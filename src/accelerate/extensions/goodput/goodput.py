"""Goodput: which share of a run's wall time went into steps that no earlier attempt had done, and where the rest went.

Rank 0 divides its time among `CAUSES`. Within a process it uses a monotonic clock, and between processes the time of the machine.
"""

import json
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accelerate.base.environment import str_to_bool
from accelerate.base.table import Report
from accelerate.checkpoint.state import run_on_all_ranks
from accelerate.extension import Extension
from accelerate.extensions.goodput import GOODPUT
from accelerate.extensions.goodput.record import (
    Attempt,
    GoodputReport,
    Record,
    launcher_started,
    report_of,
    started,
)

# The file of a checkpoint with its step, and of a run with its attempts.
STEP_FILE, RECORD_FILE = "goodput.json", "goodput.jsonl"
# A step that takes more than twice the median of the last ones is one of the median's length, and the rest is waiting. The median is
# that of so many steps, and is taken again after each of the first ones, then after each 16th.
_STEPS, _SLOW, _EVERY = 31, 2.0, 16


# The causes of the calls of the Accelerator that are no part of a step.
_PHASES = {"save_state": "save", "load_state": "load"}


class Ledger:
    """Divides the time of an attempt among `CAUSES`, without gaps. Without a record it only counts steps.

    Args:
        record: The attempts before this one, and the file; None on other ranks than 0.
        process: When the process started; in seconds since 1970, like the next two.
        launcher: When its launcher started; the same without one.
        clock: Returns the current time.
    """

    def __init__(self, record: Record | None, process: float, launcher: float, clock: Callable[[], float]) -> None:
        former = record.attempts[-1] if record is not None and record.attempts else None
        begin = launcher if former is None else former.end
        # Restarted processes have the launcher of those before them, which started earlier than those ended.
        launched = max(launcher, begin)
        process = max(process, launched)
        shift = max(0.0, process - clock())  # the machine's clock may have been set back
        self._now: Callable[[], float] = (lambda: clock() + shift) if shift else clock
        self._since = self._now()
        number, furthest = (0, 0) if record is None or former is None else (len(record.attempts), former.furthest)
        self.attempt = attempt = Attempt(number, begin, self._since, furthest=furthest)
        attempt.seconds["down"] = launched - begin
        is_restart = former is not None and launched == begin
        attempt.seconds["failure" if is_restart else "start"] = process - launched
        attempt.seconds["imports"] = self._since - process
        self.record = record
        self._recent: deque[float] = deque(maxlen=_STEPS)
        self._median = 0.0
        self._first = ""  # the cause of the first step, which is a part of the set-up until its length is known
        self._heartbeat = None if record is None else record.heartbeat()
        self._beat()

    def _beat(self) -> None:
        self.attempt.end = self._since
        if self._heartbeat is not None:
            self._heartbeat.write(self.attempt)

    def step_ended(self) -> None:
        """Give the time since the last step, without saves and loads, to the step that ends now."""
        now, attempt = self._now(), self.attempt
        interval = attempt.unfinished + now - self._since
        attempt.unfinished, self._since = 0.0, now
        attempt.step += 1
        cause = "recomputed"
        if attempt.step > attempt.furthest:
            attempt.furthest, cause = attempt.step, "productive"
            attempt.steps += 1
        else:
            attempt.recomputed_steps += 1
        if self._recent:
            self._give(attempt, cause, interval)
        elif self._first:
            # The first step has taken as long as the second: more of it was compilation and the like.
            share = min(interval, attempt.seconds["setup"])
            attempt.seconds["setup"] -= share
            attempt.seconds[self._first] += share
            attempt.seconds[cause] += interval
        else:
            attempt.seconds["setup"] += interval
        if self._first:
            self._recent.append(interval)
            if attempt.step % _EVERY == 0 or len(self._recent) < _EVERY:
                self._median = sorted(self._recent)[len(self._recent) // 2]
        self._first = self._first or cause
        self._beat()

    def _give(self, attempt: Attempt, cause: str, interval: float) -> None:
        length = self._median if interval > _SLOW * self._median else interval
        attempt.seconds[cause] += length
        attempt.seconds["waiting"] += interval - length

    def interrupt(self) -> None:
        """Put the time of the step aside, since a save or a load begins."""
        now = self._now()
        self.attempt.unfinished += now - self._since
        self._since = now

    def resume(self, cause: str) -> None:
        """Give the time since `interrupt` to a cause."""
        now = self._now()
        self.attempt.seconds[cause] += now - self._since
        self._since = now
        self._beat()

    def restored(self, step: int) -> None:
        """Note that the model has the state after a step: those that follow may have been done before."""
        self.attempt.step = step

    def report(self) -> GoodputReport:
        """Return the report up to now; the step under way counts as if it ended now."""
        attempt = replace(self.attempt, seconds=dict(self.attempt.seconds))
        interval = attempt.unfinished + self._now() - self._since
        if self._recent:
            self._give(attempt, "recomputed" if attempt.step < attempt.furthest else "productive", interval)
        else:
            attempt.seconds["setup"] += interval
        return report_of([*(() if self.record is None else self.record.attempts), attempt])

    def close(self) -> None:
        """Write the attempt's line: the run is over."""
        self.interrupt()
        self.attempt.finish("waiting")
        self.attempt.end = self._since
        if self.record is not None and self._heartbeat is not None:
            self.record.append(self.attempt)
            self._heartbeat.close()
            self._heartbeat = None


def _clock() -> Callable[[], float]:
    """Return a clock that begins at the machine's time and is monotonic from there."""
    offset, count = time.time() - time.perf_counter(), time.perf_counter
    return lambda: offset + count()


class Goodput(Extension):
    """Measures the goodput of a run; see `Ledger`."""

    # Of this process, by file: a second Accelerator continues the attempt of the first one.
    _ledgers: dict[str, Ledger] = {}

    def __init__(self, run: Any, path: str, ledger: Ledger) -> None:
        super().__init__(run)
        self.ledger, self._path = ledger, path
        self._counted: Any = lambda: None  # a reference to the optimizer whose steps count
        self._loaded_step: int | None = None
        self._error_before: BaseException | None = None

    @classmethod
    def attach(cls, run: Any) -> "Goodput | None":
        """Return the measurement that the environment asks for.

        Collective: call on every rank.
        """
        path = _path(run)
        if path is None:
            return None

        def begun() -> Ledger:
            try:
                process = started(os.getpid())
                record = Record(path) if run.is_main_process else None
                return Ledger(record, process, min(launcher_started() or process, process), _clock())
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{GOODPUT}={os.environ[GOODPUT]!r}: the record of the run cannot be used. {error}"
                ) from error

        ledger = cls._ledgers[path] = run_on_all_ranks(lambda: cls._ledgers.get(path) or begun())
        return cls(run, path, ledger)

    def step_ends(self, optimizer: Any) -> None:
        """Count a step of the optimizer that stepped first."""
        counted = self._counted()
        if counted is None:
            self._counted = weakref.ref(optimizer)
        elif counted is not optimizer:
            return
        self.ledger.step_ended()

    def phase_begins(self, phase: str, loss: Any) -> None:
        """Note that a save or a load begins."""
        if phase in _PHASES:
            self._loaded_step, self._error_before = None, sys.exc_info()[1]
            self.ledger.interrupt()

    def phase_ends(self, phase: str) -> None:
        """Note that a save or a load has ended; what is written in the background is no part of it."""
        if phase in _PHASES:
            failed = sys.exc_info()[1] is not self._error_before
            if self._loaded_step is not None and not failed:
                self.ledger.restored(self._loaded_step)
            self.ledger.resume(_PHASES[phase])

    def saving(self, plan: Any) -> None:
        """Put the number of the step into the checkpoint.

        Collective: call on every rank.
        """
        if plan.writes_shared:
            plan.add_bytes(STEP_FILE, json.dumps({"step": self.ledger.attempt.step}).encode())

    def loading(self, folder: str) -> None:
        """Read the number of the step, which counts once the load has ended. A checkpoint without it is from before the record.

        Collective: call on every rank.
        """
        path = os.path.join(folder, STEP_FILE)
        self._loaded_step = 0
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                self._loaded_step = int(json.load(file)["step"])

    def report_section(self) -> GoodputReport:
        """Return rank 0's report, on all ranks; `throughput_report` adds it to its own.

        Collective: call on every rank.
        """
        run = self.run
        report: GoodputReport
        (report,) = run._communicator.broadcast_object_list([self.ledger.report() if run.is_main_process else None])
        return report

    def ended(self) -> None:
        """Write the line of this attempt."""
        self.ledger.close()
        self._ledgers.pop(self._path, None)
        self.run.extensions.remove(self)


def _path(run: Any) -> str | None:
    """Return the file that the variable names; None if it says no, ValueError if it says yes and the run has no folder."""
    value = os.environ[GOODPUT].strip()
    try:
        is_on = str_to_bool(value)
    except ValueError:
        return os.path.expanduser(value)
    if not is_on:
        return None
    project = run.project_configuration
    if (folder := project.logging_dir or project.project_dir) is None:
        raise ValueError(
            f"{GOODPUT}={value!r} needs a folder for {RECORD_FILE}, but the Accelerator has no project_dir. Pass "
            f"Accelerator(project_dir=...), or set {GOODPUT} to the path of a file."
        )
    return os.path.join(folder, RECORD_FILE)


def goodput(accelerator: Any, step: int | None = None) -> Report:
    """Return where the wall time of the run went, over all its attempts, from the start of the launcher until now.

    It needs the variable ``ACCELERATE_GOODPUT``: a file, or ``1`` for ``goodput.jsonl`` in the project's folder.

    Collective: call on every rank.

    Args:
        step: The number of optimizer steps behind the model's state, where other code than `load_state` has restored it.

    Returns:
        A report whose text is a table; `seconds` by cause, `fraction` of productive time, `wall`, `attempts`, `steps`,
        `recomputed_steps`, and `values()`, a dict for `log`.

    Raises:
        RuntimeError: The run has no measurement.

    Example:
        >>> import os, tempfile
        >>> from accelerate import Accelerator
        >>> os.environ["ACCELERATE_GOODPUT"] = os.path.join(tempfile.mkdtemp(), "goodput.jsonl")
        >>> accelerator = Accelerator(cpu=True)
        >>> report = accelerator.goodput()
        >>> report.attempts, abs(sum(report.seconds.values()) - report.wall) < 1e-6
        (1, True)
        >>> accelerator.log(report.values())
        >>> del os.environ["ACCELERATE_GOODPUT"]
    """
    part = next(iter(accelerator.extensions.of_kind(Goodput)), None)
    if part is None:
        raise RuntimeError(
            f"goodput() found no measurement. Set {GOODPUT} to a file, or to 1, before the Accelerator is built; "
            "end_training() ends it."
        )
    if step is not None:
        part.ledger.restored(step)
    return part.report_section()
