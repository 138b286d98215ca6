"""The settings of copies in a peer's memory, and when a run makes one."""

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from accelerate.config.handlers import KwargsHandler


@dataclass
class PeerMemoryKwargs(KwargsHandler):
    """Copy the training state into host memory every N optimizer steps, so that restarted ranks resume from there.

    On several machines, each machine also keeps the copy of another one. See `resume_from_memory`.

    Args:
        every: Optimizer steps between two copies; ``"auto"`` measures a copy and a step, and follows `steps_between_copies`.
        max_overhead: With ``"auto"``, the share of the training time that copies may take.
        mean_time_between_failures_s: With ``"auto"``, seconds between two failures of the job. None if unknown.
        folder: A folder in a RAM file system.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True, kwargs_handlers=[PeerMemoryKwargs(every=50)])

    Source: https://www.usenix.org/conference/fast21/presentation/mohan (CheckFreq)
    """

    every: int | Literal["auto"] = "auto"
    max_overhead: float = 0.035
    mean_time_between_failures_s: float | None = None
    folder: str = "/dev/shm"

    def __post_init__(self) -> None:
        if self.every != "auto" and (type(self.every) is not int or self.every < 1):
            raise ValueError(f"every is {self.every!r}; give optimizer steps, at least 1, or 'auto'.")
        if self.every != "auto" and (self.max_overhead != 0.035 or self.mean_time_between_failures_s is not None):
            raise ValueError(
                f"every is {self.every!r}, so max_overhead and mean_time_between_failures_s would be ignored. Omit them, or pass every='auto'."
            )
        if not 0 < self.max_overhead < 1:
            raise ValueError(f"max_overhead is {self.max_overhead!r}; give a share of the time, such as 0.035.")
        if self.mean_time_between_failures_s is not None and self.mean_time_between_failures_s <= 0:
            raise ValueError(
                f"mean_time_between_failures_s is {self.mean_time_between_failures_s!r}; give seconds, or None."
            )


def steps_between_copies(
    copy_s: float, step_s: float, max_overhead: float, mean_time_between_failures_s: float | None = None
) -> int:
    """Return after how many optimizer steps the next copy is due.

    Copies take at most `max_overhead` of the time (the rule of CheckFreq). Where failures are so frequent that the optimum of
    Young and Daly, ``sqrt(2 * copy_s * mean_time_between_failures_s)``, is shorter, the copies follow that.

    Not a collective.

    Args:
        copy_s: Seconds that a copy costs the training.
        step_s: Seconds of a step without a copy.
        max_overhead: The largest share of the time for copies.
        mean_time_between_failures_s: Seconds between two failures of the job. None if unknown.

    Returns:
        Optimizer steps, at least 1.

    Example:
        >>> steps_between_copies(copy_s=0.07, step_s=0.1, max_overhead=0.035)
        20
        >>> steps_between_copies(copy_s=0.07, step_s=0.1, max_overhead=0.035, mean_time_between_failures_s=14)
        14
    """
    step_s = max(step_s, 1e-9)
    steps = math.ceil(round(copy_s / (max_overhead * step_s), 6))
    if mean_time_between_failures_s is not None:
        steps = min(steps, int(math.sqrt(2 * copy_s * mean_time_between_failures_s) / step_s + 1e-6))
    return max(1, steps)


# The step of the first copy with every="auto", and of how many steps the median counts.
_FIRST, _WINDOW = 10, 50


class Cadence:
    """Counts steps, measures what copies cost, and says when the next one is due.

    Attributes:
        steps: Optimizer steps of the run, those before it was resumed included.
        every: Optimizer steps between two copies; None before they are agreed upon.
        stalls_s: Seconds that the training thread spent on each copy.
        cost_s: Seconds that the last copy cost: its stall, and what the steps next to its thread took longer.
    """

    def __init__(self, options: PeerMemoryKwargs) -> None:
        self.steps, self.every = 0, None if options.every == "auto" else options.every
        self.stalls_s, self.cost_s = list[float](), 0.0
        self._options, self._next = options, self.every or _FIRST
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._slow_times: list[float] | None = None  # of the steps next to the thread of a copy, while there is one
        self._last: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether a copy is due after this step."""
        return self.steps >= self._next

    @property
    def step_s(self) -> float:
        """Seconds of a step without a copy, the median; 0.0 before the second step."""
        return statistics.median(self._times) if self._times else 0.0

    def step_ended(self, is_written: bool) -> None:
        """Count a step; `is_written` says whether the last copy is written."""
        now, self.steps = time.perf_counter(), self.steps + 1
        if self._last is not None:
            (self._times if self._slow_times is None else self._slow_times).append(now - self._last)
        self._last = now
        if is_written:
            self.settle()

    def settle(self) -> None:
        """Add to the cost of the last copy what the steps next to its thread took longer."""
        slow_times, self._slow_times = self._slow_times, None
        if slow_times:
            self.cost_s += len(slow_times) * max(0.0, statistics.median(slow_times) - self.step_s)

    def copied(self, stall_s: float) -> None:
        """Note that the training thread has made a copy, and that a thread writes it now."""
        self.stalls_s.append(stall_s)
        self.cost_s, self._slow_times, self._last = stall_s, [], time.perf_counter()

    def agree(self, copy_s: float, step_s: float) -> None:
        """Choose the next step by numbers that are the same on all ranks."""
        if self._options.every == "auto":
            limits = self._options.max_overhead, self._options.mean_time_between_failures_s
            self.every = steps_between_copies(copy_s, step_s, *limits)
        self._next = self.steps + (self.every or 1)

    def resume_at(self, steps: int) -> None:
        """Count from the steps of the checkpoint that was loaded."""
        self.steps, self._next = steps, steps + (self.every or _FIRST)
