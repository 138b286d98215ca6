"""What follows the publishing of a Trainer's checkpoint: `on_save`, the manifest of what callbacks changed, and the removal of older ones.

Callbacks get the final folder and may do anything with it. The files that they leave are the checkpoint. Older checkpoints are removed
afterwards: a run that is killed while a callback changes the new one still has the one before.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from transformers import Trainer

from accelerate.checkpoint import formats, manifest
from accelerate.checkpoint.barrier import SaveBarrier, default_store
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.save import Save
from transformers_patch.checkpoints import capture
from transformers_patch.symbols import shadowed

logger = logging.getLogger(__name__)

# Attribute of a Trainer: what is still to be done after its last save.
_DUE = "_due_after_on_save"


def expect(trainer: Any, save: Save, remove_older: Callable[[], None], leave: Callable[[], None]) -> None:
    """Wait for the Trainer's call of `on_save`, then finish a published save; at once if the Trainer will not call it. All ranks."""
    folder, handler = save.storage.location, trainer.callback_handler
    stamps = capture.stamps_below(folder) if save.leads else {}

    def finish() -> None:
        if save.leads:
            _amend(folder, save.barrier.name, stamps, save.group.rank)
        remove_older()

    vars(trainer)[_DUE] = finish
    if not trainer.control.should_save:
        settle(trainer)
        leave()
        return

    def on_save(args: Any, state: Any, control: Any) -> Any:
        vars(handler).pop("on_save", None)
        problem = None
        try:
            control = handler.on_save(args, state, control)
        except BaseException as error:  # the other ranks raise, too
            problem = error
        barrier = SaveBarrier("on_save", folder, save.group, default_store())
        barrier.begin()
        barrier.any_of(False, problem)
        settle(trainer)
        barrier.leave()
        leave()
        return control

    vars(handler)["on_save"] = on_save


def settle(trainer: Any) -> None:
    """Finish a save whose `on_save` has been called, or was never called. Not a collective."""
    vars(trainer.callback_handler).pop("on_save", None)
    if (finish := vars(trainer).pop(_DUE, None)) is not None:
        finish()


def _amend(folder: str, save: str, stamps: dict[str, capture.Stamp], rank: int) -> None:
    """Let the manifest list the files as callbacks left them. One process per folder; a folder that is gone stays gone."""
    try:
        now = capture.stamps_below(folder)
        removed = stamps.keys() - now.keys()
        changed = [name for name, stamp in now.items() if stamps.get(name) != stamp]
        if not (removed or changed) or manifest.NAME not in now:
            return
        listing = Manifest.read(folder)
        if listing.save != save:
            return
        files = {name: entry for name, entry in listing.files.items() if name not in removed}
        files |= {
            name: formats.describe(os.path.join(folder, name), rank) for name in changed if name != manifest.NAME
        }
        replace(listing, files=files).write(folder)
    except (OSError, manifest.DamagedCheckpoint) as error:
        logger.warning("The manifest of %s does not list what callbacks changed: %s", folder, error)


class Rotations:
    """Calls of a project's own `rotate_checkpoints`, which wait until the checkpoint is published."""

    def __init__(self, trainer: Any) -> None:
        module = sys.modules[Trainer.__module__]
        found = [(module, "rotate_checkpoints"), (trainer, "_rotate_checkpoints")]
        self._replaced = [(owner, name) for owner, name in found if capture.is_foreign(getattr(owner, name, None))]
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        """Keep the calls that a block makes."""
        with contextlib.ExitStack() as stack:
            for owner, name in self._replaced:
                stack.enter_context(shadowed(owner, **{name: self._keep(getattr(owner, name))}))
            yield

    def _keep(self, function: Callable[..., Any]) -> Callable[..., None]:
        return lambda *args, **options: self.calls.append((function, args, options))

    def run(self, hidden: str, run_dir: str) -> None:
        """Make the calls, with the output folder where they named the hidden one."""

        def final(value: Any) -> Any:
            return value.replace(hidden, run_dir) if isinstance(value, str) else value

        for function, args, options in self.calls:
            function(*map(final, args), **{name: final(value) for name, value in options.items()})
