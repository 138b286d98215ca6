"""A Trainer that a signal asks to stop: all ranks save after the same step, and leave with status 75.

The handler takes a note. A callback sees it at the end of an optimizer step; several ranks agree on the step through their key-value
store, as a loop of an Accelerator does, and exchange nothing until a signal comes. The save then ends the run.
"""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from accelerate.checkpoint.ranks import default_store
from accelerate.extensions.hang import hang
from accelerate.extensions.preemption.watch import Preempted, StopStep
from accelerate.runtime.failure import LAUNCHER, PREEMPTED

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
_runs = itertools.count()


class Stop(TrainerCallback):
    """Lets the Trainer save and stop after the step on which all ranks have agreed."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._received = self.number = 0
        self._agreement: StopStep | None = None
        hang.watch(default_store(), rank, world_size)
        self._alone = world_size == 1
        if not self._alone and (watcher := hang.watcher()) is not None:
            self._agreement = StopStep(watcher, f"trainer/{next(_runs)}")  # type: ignore[arg-type]

    def note(self, number: int, frame: Any) -> None:
        """Take note of a signal. It runs between any two instructions, so it does nothing else."""
        self._received = self._received or number

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> Any:
        """Ask for a save, after which the Trainer stops, if a signal came to any rank.

        Collective: call on every rank.
        """
        if self._agreement is not None:
            self.number = self.number or self._agreement.count(self._received)
        elif self._alone:
            self.number = self._received
        if self.number:
            control.should_save = control.should_training_stop = True
        return control

    def close(self) -> None:
        """End the agreement."""
        if self._agreement is not None:
            self._agreement.closed = True


@contextlib.contextmanager
def watching(trainer: Any) -> Iterator[None]:
    """Watch the signals that nothing else handles, while a Trainer trains on one process or under our launcher.

    Collective: call on every rank.
    """
    args = trainer.args
    if args.world_size > 1 and LAUNCHER not in os.environ:
        yield
        return
    stop, main = Stop(args.process_index, args.world_size), threading.current_thread() is threading.main_thread()
    # Ranks that cannot agree on a step keep the system's way: a signal ends them.
    acts = main and (stop._alone or stop._agreement is not None)
    free = [number for number in _SIGNALS if acts and signal.getsignal(number) is signal.SIG_DFL]
    trainer.add_callback(stop)
    for number in free:
        signal.signal(number, stop.note)
    try:
        yield
    finally:
        stop.close()
        trainer.remove_callback(stop)
        for number in free:
            signal.signal(number, signal.SIG_DFL)


def leave_if_due(trainer: Any, place: str) -> None:
    """End the process, if the checkpoint that has just taken its place is the one that a signal asked for.

    Collective: call on every rank.

    Raises:
        Preempted: It is; a `SystemExit` with status 75.
    """
    for stop in trainer.callback_handler.callbacks:
        if isinstance(stop, Stop) and stop.number:
            trainer.accelerator.wait_for_everyone()
            raise Preempted(PREEMPTED, place, signal.Signals(stop.number))
