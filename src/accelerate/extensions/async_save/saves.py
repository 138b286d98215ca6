"""The saves of a run that continue after the call: `save_state(blocking=False)` and `wait_for_checkpoint`."""

import sys
import weakref
from typing import Any

from accelerate import comm
from accelerate.base._warn import warn_user
from accelerate.checkpoint.save import Save
from accelerate.extension import Extension
from accelerate.extensions.async_save.background import Background
from accelerate.extensions.async_save.copies import snapshot
from accelerate.training.run import TrainingRun
from accelerate.training.saving import finish_now


class AsyncSaves(Extension):
    """Waits for the save in flight where the run saves, loads or ends, and reports there what went wrong."""

    order = 100  # what other extensions measure and compare does not wait for the save

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.background = Background()
        self._extensions: Any = weakref.ref(run.extensions)  # those of a copied Accelerator, too

    def phase_begins(self, phase: str, loss: Any) -> None:
        """Wait for the save in flight; the call raises its error on all ranks, once its arguments are checked."""
        if phase in ("save_state", "load_state"):
            self._extensions().former_problem = self.background.wait(f"{phase}()")

    def phase_ends(self, phase: str) -> None:
        """Forget the error if the call has raised it; else the next call gets it."""
        if phase in ("save_state", "load_state"):
            extensions = self._extensions()
            problem, extensions.former_problem = extensions.former_problem, None
            if problem is not None and sys.exc_info()[1] is problem:
                self.background.forget()

    def released(self) -> None:
        """Release the memory of the copies."""
        self.background.renew_buffers()

    def ended(self) -> None:
        """Wait for the save in flight, before the process group is destroyed; raise its error."""
        self.background.finish()


def finish_in_background(accelerator: TrainingRun, save: Save) -> None:
    """Copy what was collected, and write and publish it in a thread.

    Collective: call on every rank.
    """
    if not save.ranks.can_run_in_thread:
        warn_user("save_state(blocking=False) writes at once here: these ranks have no key-value store to meet in.")
        finish_now(accelerator, save)
        return
    extensions = accelerator.extensions
    attached = extensions.of_kind(AsyncSaves)
    background = (attached[0] if attached else extensions.add(AsyncSaves(accelerator))).background
    if accelerator._state_io.saves_shards:
        save.shards_group = comm.side_group(beside=True)
    save.run_step(snapshot, save.plan, background.buffers)
    try:
        save.check_collected()
    except BaseException:
        background.buffers.release()
        raise
    background.start(lambda: save.finish(threads=1), what=save.storage.location)


def wait_for_checkpoint(accelerator: TrainingRun) -> None:
    """Wait until what ``save_state(blocking=False)`` writes is in its place.

    Not a collective.

    Raises:
        RuntimeError: It could not be saved, on this rank or another one.

    Example:
        >>> from accelerate import Accelerator
        >>> Accelerator(cpu=True).wait_for_checkpoint()
    """
    for saves in accelerator.extensions.of_kind(AsyncSaves):
        saves.background.finish()
