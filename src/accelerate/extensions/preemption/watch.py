"""A run that a signal asks to stop: all ranks save after the same step, and leave.

Three things happen at three places. A signal handler raises a flag in the process that got the signal. The next step of a prepared
optimizer there starts an agreement of all ranks on the step to stop at (`StopStep`); steps before that exchange nothing. A prepared
loader that is requested the next batch after that step saves and leaves: the step is over by then, with the scheduler, and with
whatever else the loop does in it.
"""

import atexit
import contextlib
import itertools
import logging
import os
import signal
import threading
import time
import types
import weakref
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from accelerate import comm
from accelerate.checkpoint.manifest import CHECKPOINTS_FOLDER, numbered_folder
from accelerate.checkpoint.storage import storage_of
from accelerate.comm.in_step import ends_are_uneven
from accelerate.extension import Extension
from accelerate.extensions.preemption.workers import masked_start
from accelerate.runtime import torch_private
from accelerate.runtime.failure import PREEMPTED
from accelerate.training.run import TrainingRun

try:
    from accelerate.extensions.hang.hang import watcher as watcher_of_process
except ModuleNotFoundError:  # that extension was deleted: the ranks exchange in each step whether a signal came

    def watcher_of_process() -> Any:
        """Return no watcher."""
        return None


logger = logging.getLogger(__name__)

# A launcher passes on a signal that its processes got from the scheduler already; that is one request, not two.
REPEAT_S = 5.0
# Signals that end a process at once, that report its faults, or that torch's data loaders use.
_UNSUITABLE = {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGCHLD"}


class Preempted(SystemExit):
    """Raised by a prepared loader when the run has saved itself after a signal; the process ends with status 75.

    It is no `Exception`, so that only `finally` blocks and a handler that names it see it.

    Args:
        code: The exit status.
        location: The checkpoint.
        number: The signal that came.
    """

    def __init__(self, code: int = PREEMPTED, location: str = "", number: signal.Signals | None = None) -> None:
        super().__init__(code)
        self.location = location
        self.number = number


def _finish_trackers(accelerator: TrainingRun) -> None:
    try:
        from accelerate.extensions.trackers.extension import Trackers
    except ModuleNotFoundError:  # that extension was deleted
        return
    for trackers in accelerator.extensions.of_kind(Trackers):
        trackers.ended()


def is_watching() -> bool:
    """Return whether this process watches signals. Not a collective."""
    return _installed is not None and not _installed.closed


class Preemption(Extension):
    """Tells the process's `Watch` of the steps and loaders of one run; the watch may be that of another run of the process."""

    @classmethod
    def attach(cls, run: Any) -> "Preemption | None":
        """Watch the signals of a run that names some; return None where nothing is watched."""
        install(run)
        return cls(run) if is_watching() else None

    def step_ends(self, optimizer: Any) -> None:
        """Agree on the step to stop at, after a signal."""
        if _installed is not None:
            _installed.stepped()

    def between_batches(self, loader: Any) -> None:
        """Save and leave after the step to stop at."""
        if _installed is not None:
            _installed.leave_if_due(loader)

    def starting_workers(self, loader: Any) -> contextlib.AbstractContextManager[Any]:
        """Let workers ignore the signals that schedulers send to all processes."""
        return masked_start(loader, () if _installed is None else _installed.numbers)

    def ended(self) -> None:
        """Give the signals back to the handlers before."""
        if _installed is not None and _installed.accelerator() is self.run:
            _installed.close()


def should_stop(accelerator: Any) -> bool:
    """Whether a signal of ``ProjectConfiguration.save_on_signal`` came to some rank.

    It changes when a prepared optimizer steps, on every rank at the same step. A loop over a prepared loader need not
    look at it: asked for the next batch, the loader saves a checkpoint and leaves.

    Not a collective.
    """
    return _installed is not None and _installed.accelerator() is not None and _installed.stops


def check_stop(accelerator: Any) -> bool:
    """Ask all ranks whether a signal of ``ProjectConfiguration.save_on_signal`` came, and wait for the answer.

    For code without optimizer steps, such as a long evaluation; ``should_stop`` is the same afterwards. Without
    ``save_on_signal`` it is False, and nothing is exchanged.

    Collective: call on every rank.

    Example:
        >>> from accelerate import Accelerator
        >>> Accelerator(cpu=True).check_stop()
        False
    """
    return should_stop(accelerator) or (
        _installed is not None and _installed.accelerator() is not None and _installed.ask()
    )


def install(accelerator: TrainingRun) -> None:
    """Watch the signals that the project configuration names, in place of what watched before, or raise ValueError."""
    global _installed, _follows_forks
    project = accelerator.project_configuration
    if project.save_on_signal is None:
        return
    numbers = signals_of(project.save_on_signal)
    if project.project_dir is None:
        raise ValueError(
            f"save_on_signal={project.save_on_signal!r} needs a folder to save to, but project_dir is None. Pass "
            "ProjectConfiguration(project_dir=...)."
        )
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            f"save_on_signal was set in the thread {threading.current_thread().name!r}, but only the main thread can receive signals. "
            "Build the Accelerator there, or omit save_on_signal."
        )
    received = 0
    if _installed is not None and not _installed.closed:
        # A run that builds a new Accelerator has not yet handled the signal.
        received = 0 if _installed.leaving else _installed.received
        _installed.close()
    _installed = Watch(accelerator, numbers, received)
    if not _follows_forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
        _follows_forks = True


def signals_of(signals: Any) -> tuple[signal.Signals, ...]:
    """Return the signals that numbers, names and members of ``signal.Signals`` stand for, each once, or ValueError."""
    values = signals if isinstance(signals, Iterable) and not isinstance(signals, str) else [signals]
    return tuple(dict.fromkeys(_signal(value) for value in values))


def _signal(value: Any) -> signal.Signals:
    number = None
    if isinstance(value, str):
        number = signal.Signals.__members__.get(f"SIG{value.upper().removeprefix('SIG')}")
    elif isinstance(value, int) and not isinstance(value, bool):
        with suppress(ValueError):
            number = signal.Signals(value)
    if number is None or number.name in _UNSUITABLE:
        raise ValueError(
            f"save_on_signal got {value!r}, which is no signal that a process can wait for. Use SIGTERM, SIGUSR1 or SIGUSR2."
        )
    return number


class Watch:
    """The signals that a process watches, and the state of the training between two batches.

    It releases a dead Accelerator: the former handlers get the signals. `received` is an earlier signal, or 0.
    """

    def __init__(self, accelerator: TrainingRun, numbers: tuple[signal.Signals, ...], received: int = 0) -> None:
        self.accelerator = weakref.ref(accelerator)
        weakref.finalize(accelerator, self.close).atexit = False
        self.numbers = numbers
        self.received = received
        self.number = 0
        self.leaving = False
        self.closed = False
        self._alone = comm.current().world_size == 1
        self._agreement = self._agree(None)
        # A step was taken, and the loaders of its loop have not been asked for another batch since.
        self._stepped = False
        self._loops: list[weakref.ref[Any]] = []
        self._times: dict[int, float] = {}
        self._former: dict[int, Any] = {number: signal.signal(number, self._on_signal) for number in numbers}

    @property
    def stops(self) -> bool:
        """Whether the run must stop, as far as all ranks know."""
        if self._alone:
            self.number = self.number or self.received
        return bool(self.number)

    # -- signals -----------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        # It runs between any two instructions of the main thread, so it takes notes and nothing else.
        current_time, first = time.monotonic(), self._times.get(number)
        self._times.setdefault(number, current_time)
        again = first is not None and current_time - first >= REPEAT_S
        if self.closed or (again and not self.leaving):
            self._give_back(number)
            signal.raise_signal(number)
            return
        self.received = self.received or number

    def _give_back(self, number: int) -> None:
        if signal.getsignal(number) == self._on_signal:
            former = self._former[number]
            signal.signal(number, signal.SIG_DFL if former is None else former)

    def close(self) -> None:
        """Stop watching. In another thread than the main one the next signal does the rest."""
        self.closed = True
        if self._agreement is not None:
            self._agreement.closed = True
        with suppress(ValueError):
            for number in self.numbers:
                self._give_back(number)

    # -- steps -------------------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """Take note that a prepared optimizer ends an accumulation step. Collective: call on every rank."""
        accelerator = self.accelerator()
        if accelerator is None or self.closed or ends_are_uneven():
            return
        self._stepped = True
        # The progress of each prepared loader that is being iterated; a loader's views share it.
        progresses = [getattr(reference(), "_progress", None) for reference in accelerator.gradient_state._active]
        self._loops = [weakref.ref(progress) for progress in progresses if progress is not None]
        self._agreement = self._agree(self._agreement)
        if self._agreement is None:
            self.ask()
        else:
            self.number = self.number or self._agreement.count(self.received)

    def _agree(self, former: "StopStep | None") -> "StopStep | None":
        """Return the agreement of this process group, which may have been built again; None where no watcher looks at a store."""
        watcher = None if self._alone else watcher_of_process()
        if watcher is None or (former is not None and former.watcher is watcher):
            return former
        return StopStep(watcher, next(_agreements))

    def ask(self) -> bool:
        """Exchange which ranks got a signal. Collective: call on every rank."""
        if not (self.closed or self._alone or self.number):
            self.number = int(comm.current().all_reduce(torch.tensor([self.received]), "max"))
        return self.stops

    # -- loaders -----------------------------------------------------------------------------------------------------

    def leave_if_due(self, loader: Any) -> None:
        """Leave right after a step, when a loader of the step's loop continues, or begins its next epoch.

        So an evaluation in the middle of a training loop, or after it, is never cut off, and code between two epochs runs.

        Collective: call on every rank.
        """
        if not self._stepped or all(progress() is not loader._progress for progress in self._loops):
            return
        self._stepped = False
        accelerator = self.accelerator()
        if accelerator is not None and not self.closed and self.stops:
            self._leave(accelerator)

    def _leave(self, accelerator: TrainingRun) -> NoReturn:
        number = signal.Signals(self.number)
        location = str(_save(accelerator))
        # From here on the process is ending; the launcher may still pass on the signal.
        self.leaving = True
        if accelerator.is_main_process:
            logger.warning(
                f"{number.name} came: the run is saved in {location}, and ends with status {PREEMPTED}. Submitted again, it "
                "resumes there with load_state(latest=True, missing_ok=True)."
            )
        _finish_trackers(accelerator)
        accelerator.wait_for_everyone()
        # Not yet: `finally` blocks of the program may communicate.
        atexit.register(accelerator.state.destroy_process_group)
        raise Preempted(PREEMPTED, location, number)


def _save(accelerator: TrainingRun) -> Any:
    """Save under the next free number of the project, and wait until the checkpoint is in its place.

    Collective: call on every rank.
    """
    with contextlib.suppress(RuntimeError):  # one that failed has been logged, and is no reason not to save now
        _wait_for_checkpoint(accelerator)
    project = accelerator.project_configuration
    storage = storage_of(project.project_dir).child(CHECKPOINTS_FOLDER)  # type: ignore[arg-type]  # `install` has looked
    following, problem = 0, ""
    if accelerator.is_main_process:
        try:
            following = max((number for number, _ in storage.checkpoints()), default=-1) + 1
        except Exception as error:  # the others would wait
            problem = f"{type(error).__name__}: {error}"
    ((following, problem),) = comm.current().broadcast_object_list([(following, problem)])
    if problem:
        raise RuntimeError(
            f"The checkpoints in {storage.location!r} cannot be listed, so the run is not saved. {problem}"
        )
    # A run that started again next to older checkpoints must not fail now, nor save under a number that is not the latest.
    project.iteration = max(project.iteration, following)
    location = storage.child(numbered_folder(project.iteration)).location
    accelerator.save_state(None if project.automatic_checkpoint_naming else location)
    _wait_for_checkpoint(accelerator)
    return location


def _wait_for_checkpoint(accelerator: Any) -> None:
    if hasattr(accelerator, "wait_for_checkpoint"):  # of an extension
        accelerator.wait_for_checkpoint()


class StopStep:
    """The step after which all ranks stop, agreed through the store; until a signal comes a step only counts. All ranks make one.

    The rank that got the signal leaves it in the store and waits. The watcher of each rank reads it there, holds its rank at the
    next step, and reports how many it has taken. The last one to report sets the stop: one step after the largest count, which no
    rank has passed. It takes a few requests a rank, and no longer than two looks, because it needs no training thread.
    """

    def __init__(self, watcher: Any, number: int) -> None:
        self.closed = False
        self.watcher, self._place = watcher, f"stop/{number}"
        self._steps, self._signal, self._stop_at = 0, 0, 0
        self._held = False
        self._known = threading.Event()
        watcher.errands.append(self._look)

    def count(self, received: int) -> int:
        """Count a step of this rank, which `received` a signal or 0; return the signal after which all ranks stop here, or 0."""
        self._steps += 1
        if received and not self._signal:
            keys = dist.PrefixStore(self._place, self.watcher.store())
            self._signal = int(keys.compare_set("signal", "", str(received)))
        if self._signal and not self._stop_at:
            self._wait()
        return self._signal if self._stop_at and self._steps >= self._stop_at else 0

    def _wait(self) -> None:
        limit = torch_private.live_timeout() or timedelta(minutes=30)
        end = time.monotonic() + limit.total_seconds()
        while not self._known.wait(0.1):
            if self.watcher.closed:
                return  # the program of some rank is over
            if not self.watcher.looks or time.monotonic() > end:
                raise RuntimeError(
                    "A process was lost while the ranks exchanged whether a signal came. The output of the process that ended "
                    "first names the cause."
                )

    def _look(self, store: Any, last: bool) -> bool:
        """Continue the agreement, in the watcher's thread; return whether it is under way."""
        keys = dist.PrefixStore(self._place, store)
        # The signal is known here before the count is read: from then on the training thread waits at its next step.
        self._signal = self._signal or int(keys.compare_set("signal", "", "") or 0)
        if (self._signal or self.closed or last) and not self._held:
            self._held = True
            self._report(keys)
        if self.closed:
            self.watcher.errands.remove(self._look)
        elif self._held and not self._stop_at:
            self._stop_at = int(keys.compare_set("step", "", "") or 0)
            if self._stop_at:
                self._known.set()
        return self._held and not self._stop_at

    def _report(self, keys: Any) -> None:
        count, most = str(self._steps), ""
        while int(most or -1) < int(count):
            most = keys.compare_set("most", most, count).decode()
        if keys.add("come", 1) == self.watcher.world_size:
            # Read again: another rank may have raised it between the two requests.
            keys.set("step", str(int(keys.compare_set("most", "", "")) + 1))


# A forked process gets the former handlers, because a pool that the program ends with SIGTERM must end. In between signals wait,
# or one that came too early would be lost.


def _before_fork() -> None:
    numbers = None if _installed is None or _installed.closed else _installed.numbers
    _forking.mask = None if numbers is None else signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _after_fork() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    if _installed is not None:
        _installed.close()
    _after_fork()


_installed: Watch | None = None
_agreements = itertools.count()
_follows_forks = False
_forking = threading.local()
