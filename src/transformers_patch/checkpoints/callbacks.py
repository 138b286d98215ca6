"""Steps after the publishing of a Trainer's checkpoint: `on_save`, the update of the manifest, and the removal of older checkpoints.

Callbacks get the final folder and may change it. The manifest is updated afterwards, and older checkpoints are removed last: a run that
is killed while a callback edits the new checkpoint still has the one before.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import Trainer

from accelerate.checkpoint import formats, manifest
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.ranks import Ranks, default_store
from accelerate.checkpoint.save import Save
from transformers_patch.checkpoints import capture
from transformers_patch.symbols import shadowed

logger = logging.getLogger(__name__)

# Attribute of a Trainer: the checkpoint that it published last.
_PUBLISHED = "_published_checkpoint"


def expect(trainer: Any, save: Save, remove_older: Callable[[], None], leave: Callable[[], None]) -> None:
    """Run the steps after `on_save` when the Trainer has called it; at once if the Trainer will not call it.

    Collective: call on every rank.
    """
    folder, handler = save.storage.location, trainer.callback_handler
    vars(trainer)[_PUBLISHED] = _Published(folder, save.ranks.name, save.group.rank, save.stages, remove_older)
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
        ranks = Ranks(save.group, default_store())
        try:
            ranks.agree("on_save", folder)
            ranks.first_error(problem)
        except BaseException:
            vars(trainer).pop(_PUBLISHED, None)  # a half-edited file must not be accepted
            raise
        settle(trainer)
        ranks.leave()
        leave()
        return control

    vars(handler)["on_save"] = on_save


def settle(trainer: Any) -> None:
    """Update the manifest of the last published checkpoint, and then remove older checkpoints, once.

    Called after `on_save`, and again before the next save and at the end of the training: threads of callbacks may still write.

    Not a collective.
    """
    vars(trainer.callback_handler).pop("on_save", None)
    if (published := vars(trainer).get(_PUBLISHED)) is not None:
        published.settle()


@dataclass
class _Published:
    """A published checkpoint, and the files in it as its manifest lists them."""

    folder: str
    save: str
    rank: int
    leads: bool
    remove_older: Callable[[], None]
    stamps: dict[str, capture.Stamp] = field(init=False)

    def __post_init__(self) -> None:
        self.stamps = capture.stamps_below(self.folder) if self.leads else {}

    def settle(self) -> None:
        if self.leads:
            self._amend()
        remove_older, self.remove_older = self.remove_older, lambda: None
        remove_older()

    def _amend(self) -> None:
        """Let the manifest list the files as callbacks left them; a folder that is gone stays gone.

        A new file is the user's own, and is not listed, unless a reader would take it for a part of the checkpoint.
        """
        former, self.stamps = self.stamps, capture.stamps_below(self.folder)
        names = {name for name in former | self.stamps if former.get(name) != self.stamps.get(name)} - {manifest.NAME}
        if not names or manifest.NAME not in self.stamps:
            return
        try:
            listing = Manifest.read(self.folder)
            if listing.save != self.save:
                return
            files = dict(listing.files)
            for name in names:
                is_listed = files.pop(name, None) or manifest.is_checkpoint_file(name.split("/")[0])
                if is_listed and name in self.stamps:
                    with contextlib.suppress(FileNotFoundError):
                        files[name] = formats.describe(os.path.join(self.folder, name), self.rank)
            if files != listing.files:
                replace(listing, files=files).write(self.folder)
        except (OSError, manifest.DamagedCheckpoint) as error:
            logger.warning("The manifest of %s does not list what callbacks changed: %s", self.folder, error)


class Rotations:
    """Calls of a project's own `rotate_checkpoints`, which wait until the checkpoint is published."""

    def __init__(self, trainer: Any) -> None:
        module = sys.modules[Trainer.__module__]
        targets = [(module, "rotate_checkpoints"), (trainer, "_rotate_checkpoints")]
        self._replaced = [(owner, name) for owner, name in targets if capture.is_foreign(getattr(owner, name, None))]
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
