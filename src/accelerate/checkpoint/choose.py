"""Choosing the checkpoint to load: the one at a location, or the newest that loads among those of a run.

Rank 0 searches for all. Where machines have separate disks, one rank of each machine looks at its copy.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate.checkpoint import manifest
from accelerate.checkpoint.manifest import DamagedCheckpoint, Manifest, damaged
from accelerate.checkpoint.storage import CheckpointStatus, CheckpointStorage, storage_of
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.runtime.run import Run

logger = logging.getLogger(__name__)


class TryNext(Exception):
    """The checkpoint cannot be loaded, but another one may: it is damaged, or another save has taken its place."""

    def __init__(self, reasons: Sequence[str], replaced: bool = False) -> None:
        super().__init__("; ".join(manifest.first_of(reasons)))
        self.reasons, self.replaced = reasons, replaced


@dataclass
class Search:
    """Finds the checkpoint to load. Only rank 0 calls `answer`.

    Attributes:
        passed: Why checkpoints were passed over, by location.
        damaged: Locations of those that some rank found damaged, with the names of their saves.
        listing: The manifest of the checkpoint that `answer` names; None without one.
    """

    run: Run
    storage: CheckpointStorage
    latest: bool
    passed: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str | None] = field(default_factory=dict)
    listing: Manifest | None = None

    def answer(self) -> dict[str, Any]:
        """Return which checkpoint all ranks load, or why there is none: small and plain data."""
        try:
            found = self._newest() if self.latest else (self.storage, self.storage.state())
            return self._no_checkpoint() if found is None else self._described(*found)
        except Exception as error:
            return _no(OSError, f"{self.storage.location!r} could not be read. {type(error).__name__}: {error}")

    def _no_checkpoint(self) -> dict[str, Any]:
        passed = [f"{location}: {reason:.1000}" for location, reason in self.passed.items()]
        more = "".join(f"\n  passed over {line}" for line in manifest.first_of(passed))
        text = f"There is no complete checkpoint in {self.storage.location!r}. Save one first, or name one.{more}"
        return _no(FileNotFoundError, text, nothing=not passed)

    def _described(self, storage: CheckpointStorage, state: CheckpointStatus) -> dict[str, Any]:
        if state.kind == "absent":
            hint = " To load the newest checkpoint, call load_state(latest=True)." if storage.name == "latest" else ""
            return _no(ValueError, f"load_state({storage.location!r}): {state.reason}.{hint}", nothing=True)
        if not state.loads:
            return _no(DamagedCheckpoint, str(damaged(storage.location, [state.reason])))
        if state.manifest is None:
            logger.warning("%s is loaded unverified: %s.", storage.location, state.reason)
        self.listing = state.manifest
        return {
            "location": storage.location,
            "child": "" if storage.location == self.storage.location else storage.name,
            "save": _save_of(state),
            "folder": storage.fetch() if storage.shared else "",
            "following": self.following_number(storage),
        }

    def _newest(self) -> tuple[CheckpointStorage, CheckpointStatus] | None:
        """Return the newest checkpoint that may be loaded; older ones are not looked at."""
        listed = None
        while (now := self.storage.checkpoints()) != listed:  # a run that prunes during this search has others by now
            listed, absent = now, True
            for _, storage in reversed(now):
                state = storage.state()
                if state.loads and self.damaged.get(storage.location) != _save_of(state):
                    return storage, state
                absent = absent and state.kind == "absent"
                if state.kind == "incomplete":
                    self._pass(storage.location, state.reason)
            if absent:
                state = self.storage.state()
                if state.kind == "complete" and self.damaged.get(self.storage.location) != _save_of(state):
                    return self.storage, state
                if state.kind == "incomplete" and self.storage.files():
                    self._pass(self.storage.location, state.reason)
        return None

    def _pass(self, location: str, reason: str) -> None:
        if self.passed.get(location) != reason:
            self.passed[location] = reason
            logger.warning("Passed over %s: %s", location, reason)

    def pass_over(self, choice: "Choice", reasons: Sequence[str]) -> None:
        """Do not choose a checkpoint again that some rank has found damaged.

        Collective: call on every rank.
        """
        self.damaged[choice.storage.location] = choice.save
        if self.run.process_index == 0:
            self._pass(choice.storage.location, "; ".join(reasons))

    def following_number(self, storage: CheckpointStorage) -> int | None:
        """Return the number of the next automatic name, where that follows from the checkpoint that is loaded."""
        project = self.run.project_configuration
        number = manifest.number_of(storage.name)
        if not project.automatic_checkpoint_naming or project.project_dir is None or number is None:
            return None
        checkpoints = storage_of(project.project_dir).child(manifest.CHECKPOINTS_FOLDER)
        if storage.parent() != checkpoints:
            return None
        # After going back to an older one, the newer ones keep their numbers, and the next save is the newest. Damaged ones
        # keep theirs, too: a user may want to look at them. An empty folder is of no use.
        taken = [other for other, entry in checkpoints.checkpoints() if not entry.is_empty()]
        return max(taken, default=number) + 1


_KINDS = {kind.__name__: kind for kind in (ValueError, FileNotFoundError, OSError, DamagedCheckpoint)}


def _no(kind: type[Exception], text: str, nothing: bool = False) -> dict[str, Any]:
    return {"error": kind.__name__, "text": text[:20_000], "nothing": nothing}


def refused(answer: dict[str, Any]) -> Exception | None:
    """Return the error for a search that found nothing that can be loaded; else None. Not a collective."""
    return _KINDS[answer["error"]](answer["text"]) if "error" in answer else None


def _save_of(state: CheckpointStatus) -> str:
    """Return the name of the save that wrote a checkpoint; an empty one of another library's."""
    return "" if state.manifest is None else state.manifest.save


@dataclass
class Choice:
    """The checkpoint that all ranks load.

    Attributes:
        folder: This rank's local folder of it, with the manifest that was read.
        save: The name of the save, None where it could not be read.
        problems: What is wrong with this machine's copy, found by its leader.
        following: The next automatic number.
    """

    storage: CheckpointStorage
    folder: CheckpointFolder
    save: str | None
    problems: list[str]
    following: int | None

    def judged(self, error: BaseException | None) -> BaseException | None:
        """Return the error of a phase; `TryNext` if the checkpoint is not there any more, or a file that was read is damaged.

        Not a collective.
        """
        if not isinstance(error, Exception | None):
            return error
        if self.folder.wrong:
            error = TryNext(self.folder.wrong)
        try:
            if isinstance(error, TryNext) and not self.storage.shared:  # a local copy of it stays as it was
                replaced = _save_of(self.storage.state()) != self.save
            else:
                listing = self.folder.listing
                replaced = manifest.mark(self.folder) != listing.mark or self.save not in (None, listing.save)
        except BaseException as failure:
            return failure
        return TryNext(["another save took its place"], replaced=True) if replaced else error


def own_copy(storage: CheckpointStorage, save: str) -> tuple[str, str | None, list[str], Manifest | None]:
    """Return the folder of a machine's own copy of a checkpoint, its save, what is wrong with it, and its manifest. The leader of the machine.

    OSError if a copy in an object store cannot be made.
    """
    if not storage.shared:  # rank 0 has looked at it for all
        try:
            folder, listing = storage.outline()
        except (DamagedCheckpoint, FileNotFoundError) as error:  # or another save took its place, which the save tells
            return storage.location, save, [f"{type(error).__name__}: {error}"], None
        return folder, save, [], listing
    try:
        state = storage.state()
        if not state.loads:
            return storage.location, _save_of(state), [state.reason], None
        if _save_of(state) != save:
            problem = "the machines have checkpoints of different saves: not all had published when the run ended"
            return storage.location, _save_of(state), [problem], None
        return storage.fetch(), save, [], state.manifest
    except Exception as error:
        return storage.location, None, [f"{type(error).__name__}: {error}"], None
