"""Where a checkpoint lies, how it gets there in one step, and which checkpoints of a run stay.

A checkpoint is written into a hidden folder beside its location. When all of it is there, the manifest too, and every byte has
reached the disk, the hidden folder takes the location: by one rename, or, where an older checkpoint lies there, by exchanging the
two. A reader finds the old one or the new one, and never a part. A publish that is killed between two steps is completed by the
next process that writes to the location.
"""

import contextlib
import itertools
import logging
import os
import posixpath
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from accelerate.checkpoint import manifest
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, number_of, problems
from accelerate.runtime.durable import exchange, sync_folder, sync_tree

logger = logging.getLogger(__name__)

# How long a save waits for another process to release the lock: a save in the background ends by itself, and a worker process of a
# killed run may outlive it a little.
PATIENCE_S = 60.0


class Busy(RuntimeError):
    """Another process saves to the location."""


@dataclass(frozen=True)
class State:
    """What lies at a location, why it is not complete, and its manifest if that could be read.

    Attributes:
        kind: ``"complete"`` with a manifest and its files; ``"foreign"`` for a folder of another library or of an
            older version, which cannot be verified; ``"incomplete"`` for what must not be loaded; ``"absent"``.
    """

    kind: Literal["complete", "foreign", "incomplete", "absent"]
    reason: str = ""
    manifest: Manifest | None = None

    @property
    def loads(self) -> bool:
        """Whether it may be loaded."""
        return self.kind in ("complete", "foreign")


@dataclass(frozen=True)
class Stored:
    """The bytes of a file or folder, and when it was last written, in seconds since 1970; None where not known."""

    size: int
    modified: float | None = None


@dataclass(unsafe_hash=True)
class CheckpointStorage(ABC):
    """Where a checkpoint is, or will be: an absolute path or URL, without a slash at its end.

    Attributes:
        shared: whether every process that reaches the location sees what one of them stages.
        generation: the name of what is being staged, where several ranks stage apart: that of the rank that publishes.
    """

    location: str
    shared: ClassVar[bool] = True
    generation: str | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The last part of the location."""
        return os.path.basename(self.location.rstrip("/"))

    def upload(self, staged: str) -> None:
        """Bring a staged folder to the location, unseen; where staging is not shared, before one rank publishes."""
        return

    def child(self, name: str) -> "CheckpointStorage":
        """Return the storage of that name inside this one."""
        return type(self)(posixpath.join(self.location, name))

    def parent(self) -> "CheckpointStorage":
        """Return the storage that this one lies in; a root lies in itself."""
        return type(self)(os.path.dirname(self.location))

    def state(self) -> State:
        """Return what lies here, without reading the files themselves; OSError if the store fails. Any rank, alone."""
        former, state = None, self._look()
        while not state.loads and state != former:  # another save may take the place between two steps of a look
            former, state = state, self._look()
        return state

    def _look(self) -> State:
        try:
            listing, found = self._verified()
        except FileNotFoundError:
            return State("absent", "there is no such folder")
        except NotADirectoryError:
            return State("absent", "it is a file")
        except DamagedCheckpoint as error:
            return State("incomplete", str(error))
        if listing is None:
            return State("foreign", "it has no manifest: another library or an older version saved it")
        return State("incomplete" if found else "complete", "; ".join(found), listing)

    @abstractmethod
    def _verified(self) -> tuple[Manifest | None, list[str]]:
        """Return the manifest, None for another library's save, and what is wrong with the names and sizes of files.

        FileNotFoundError for nothing, NotADirectoryError for a file, DamagedCheckpoint for what must not be loaded.
        """

    @abstractmethod
    def entries(self) -> list["CheckpointStorage"]:
        """Return the folders that lie here, by name; hidden ones are left out."""

    @abstractmethod
    def files(self) -> dict[str, Stored]:
        """Return the files that lie directly here, hidden ones too, by name; nothing if there is no such location."""

    @abstractmethod
    def stage(self) -> str:
        """Make the empty local folder in which the next checkpoint is written. One process per file system."""

    @abstractmethod
    def publish(self) -> None:
        """Let what was staged, manifest included, take the location. The process that staged it calls this."""

    @abstractmethod
    def abandon(self) -> None:
        """Remove what was staged."""

    @abstractmethod
    def fetch(self, wanted: Callable[[str], bool] | None = None) -> str:
        """Return a local folder with the wanted files, by their path in the manifest; all by default."""

    def release(self) -> None:
        """Remove what `fetch` made, if that was a copy."""
        return

    @abstractmethod
    def remove(self) -> None:
        """Remove the checkpoint; no reader sees a part of it meanwhile."""

    def sweep(self) -> None:
        """Remove what killed runs left among the checkpoints here; only a process that writes here calls it."""
        return

    def stored(self) -> Stored:
        """Return the bytes of all that is here, and when any of it was last written to, where that is known."""
        found = [*self.files().values(), *(entry.stored() for entry in self.entries())]
        modified = max((stored.modified for stored in found if stored.modified is not None), default=None)
        return Stored(sum(stored.size for stored in found), modified)

    def leftovers(self) -> dict[str, Stored]:
        """Return what saves and removals in here left behind, or are at work on right now, by location."""
        return {}

    def checkpoints(self) -> list[tuple[int, "CheckpointStorage"]]:
        """Return the automatically named checkpoints here, whole or not, with their numbers, oldest first."""
        numbered = [(number_of(entry.name), entry) for entry in self.entries()]
        return sorted((pair for pair in numbered if pair[0] is not None), key=lambda pair: pair[0])


def storage_of(path: str | os.PathLike[str]) -> CheckpointStorage:
    """Return the storage of a path, a ``file://`` URL, or one of fsspec; ImportError names a missing package."""
    text = os.path.expanduser(os.fspath(path)).removeprefix("file://").removeprefix("local://")
    if "://" in text:
        from accelerate.checkpoint.object_store import ObjectStore

        return ObjectStore(text.rstrip("/"))
    return LocalStorage(text)


def refuse_unfinished(entries: Collection[str]) -> None:
    """Raise DamagedCheckpoint if the names in a folder say that it must not be loaded: a save there has not ended."""
    if any(entry.startswith(manifest.INCOMPLETE_MARKER) for entry in entries):
        raise DamagedCheckpoint("its saving did not come to its end")
    if NAME not in entries and any(manifest.is_generators_file(entry) for entry in entries):
        raise DamagedCheckpoint(f"its manifest {NAME} is missing")


# -- a run's checkpoints -----------------------------------------------------------------------------------------------


def newest_first(folder: CheckpointStorage) -> tuple[list[CheckpointStorage], list[str]]:
    """Return the checkpoints in a folder that may be loaded, newest first, and a line for each passed over."""
    listed, states = [], []
    while not any(state.loads for _, state in states) and (now := folder.checkpoints()) != listed:
        listed = now  # a run that prunes beside this search has others by now, if none of these is left
        states = [(storage, storage.state()) for _, storage in reversed(listed)]
    if all(state.kind == "absent" for _, state in states):
        state = folder.state()
        is_one = state.kind == "complete" or (state.kind == "incomplete" and folder.files())
        states = [(folder, state)] if is_one else []
    found = [storage for storage, state in states if state.loads]
    return found, [f"{storage.location}: {state.reason}" for storage, state in states if state.kind == "incomplete"]


def prune(folder: CheckpointStorage, limit: int | None, keep: Collection[str | None]) -> None:
    """Remove the oldest checkpoints beyond a limit (None: no limit), but for the locations to `keep`.

    One rank per file system calls it, once the newest one is at its location. Only complete ones count and go, and
    what killed saves left; a damaged checkpoint stays, so that it can be looked at.
    """
    folder.sweep()
    if limit is None:
        return
    # What a link leads to is not ours to remove.
    whole = [storage for _, storage in folder.checkpoints() if storage.parent() == folder and storage.state().loads]
    surplus = max(0, len(whole) - max(limit, 1))
    for storage in [storage for storage in whole if storage.location not in keep][:surplus]:
        logger.info("Removing the checkpoint %s (total_limit=%d).", storage.location, limit)
        try:
            storage.remove()
        except OSError as error:  # the new checkpoint is whole all the same
            logger.warning("The checkpoint %s could not be removed: %s", storage.location, error)


# -- folders -----------------------------------------------------------------------------------------------------------


class LocalStorage(CheckpointStorage):
    """A folder of a file system that is mounted here; it need not exist.

    A checkpoint called X changes places by hidden folders beside it, in the order of a publish::

        .saving_X    being written; worth nothing if its writer is gone
        .ready_X     whole, with the file .publishing in it: the new one, about to take the location;
                     without that file: the former one, which the new one was exchanged with
        .replaced_X  the former one, until what is the user's own in it is in the new one
        .removed_X   being removed

    The file .lock_X is locked while a process saves or removes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # What a link points to is replaced, not the link.
        super().__init__(os.path.realpath(path))
        self._staged = ""
        self._save = contextlib.ExitStack()  # when it is closed, the staged folder goes, and then the lock

    def _beside(self, prefix: str) -> str:
        folder, name = os.path.split(self.location)
        return os.path.join(folder, prefix + name)

    def _readable(self) -> str:
        """Where the checkpoint is: at its location, or where a publish that was killed between two steps left it."""
        beside = self._beside(manifest.READY_PREFIX), self._beside(manifest.REPLACED_PREFIX)
        return next(filter(os.path.isdir, (self.location, *beside)), self.location)

    def _verified(self) -> tuple[Manifest | None, list[str]]:
        folder = self._readable()
        entries = os.listdir(folder)
        if not entries:
            raise DamagedCheckpoint("the folder is empty")
        refuse_unfinished(entries)
        if NAME not in entries:
            return None, []
        listing = Manifest.read(folder)
        return listing, problems(folder, listing)

    def entries(self) -> list[CheckpointStorage]:
        """Return the visible folders here, by name; of links those named as a checkpoint, with where they lead to."""
        folders = [entry for entry in _scan(self.location) if entry.is_dir()]
        shown = [entry.name for entry in folders if not entry.is_symlink() or number_of(entry.name) is not None]
        found = {name.removeprefix(manifest.READY_PREFIX).removeprefix(manifest.REPLACED_PREFIX) for name in shown}
        return list(dict.fromkeys(self.child(name) for name in sorted(found) if name and not name.startswith(".")))

    def files(self) -> dict[str, Stored]:
        """Return the files that lie directly here, by name."""
        found = {}
        for entry in _scan(self._readable()):
            with contextlib.suppress(OSError):  # it was removed just now
                if entry.is_file():
                    found[entry.name] = Stored(entry.stat().st_size, entry.stat().st_mtime)
        return found

    def stored(self) -> Stored:
        """Return the bytes of all that is here, and when it was last written to."""
        size, modified = 0, 0.0
        for path, _, files in os.walk(self._readable()):
            for name in (".", *files):
                with contextlib.suppress(OSError):  # it was removed just now
                    about = os.lstat(os.path.join(path, name))
                    modified = max(modified, about.st_mtime)
                    size += about.st_size if name in files else 0
        return Stored(size, modified)

    def leftovers(self) -> dict[str, Stored]:
        """Return the hidden folders of saves and removals in here, by path."""
        hidden = [entry.path for entry in _scan(self.location) if entry.name.startswith(manifest.HIDDEN_PREFIXES)]
        return {path: LocalStorage(path).stored() for path in hidden if _is_folder(path)}

    def fetch(self, wanted: Callable[[str], bool] | None = None) -> str:
        """Return the folder itself."""
        return self._readable()

    # -- publishing ----------------------------------------------------------------------------------------------------

    def stage(self) -> str:
        """Make the hidden, empty folder; OSError if no checkpoint can take the location, Busy if one is saved."""
        if os.path.isdir(self.location):
            self._refuse_what_stays()
        elif os.path.exists(self.location):
            raise NotADirectoryError(f"A checkpoint cannot take the place of a file: {self.location!r} is one.")
        _make_folder(os.path.dirname(self.location))
        self.abandon()
        with contextlib.ExitStack() as save:
            save.enter_context(self._locked())
            self._staged = self._beside(manifest.STAGING_PREFIX)
            os.mkdir(self._staged)
            save.callback(shutil.rmtree, self._staged, ignore_errors=True)
            self._save = save.pop_all()
        return self._staged

    def _refuse_what_stays(self) -> None:
        """Raise if the folder cannot be exchanged for another one."""
        inside = False
        with contextlib.suppress(FileNotFoundError):  # the working directory was removed
            inside = Path.cwd().is_relative_to(self.location)
        for reason, holds in (
            ("it is a mount point", os.path.ismount(self.location)),
            ("its parent cannot be written", not os.access(os.path.dirname(self.location), os.W_OK | os.X_OK)),
            ("the process works in it", inside),
        ):
            if holds:
                raise OSError(f"{self.location!r} cannot be renamed: {reason}. Save into a folder inside it.")

    def abandon(self) -> None:
        """Remove what was staged."""
        self._save.close()

    def publish(self) -> None:
        """Let what was staged, whose files are on the disk, take the location. All in it but the parts of a checkpoint stays."""
        sync_tree(self._staged)
        if not os.path.lexists(self.location):
            os.rename(self._staged, self.location)
            sync_folder(os.path.dirname(self.location))
        else:
            with contextlib.suppress(OSError):
                shutil.copymode(self.location, self._staged)
            Path(self._staged, manifest.PUBLISHING_MARKER).touch()
            os.rename(self._staged, self._beside(manifest.READY_PREFIX))
        self._complete()
        self._save.close()

    def _complete(self) -> None:
        """Bring a publish to its end from whichever step it has come to, and remove what is worth nothing. Needs the lock."""
        for prefix in (manifest.STAGING_PREFIX, manifest.REMOVED_PREFIX):
            shutil.rmtree(self._beside(prefix), ignore_errors=True)
        ready, replaced = self._beside(manifest.READY_PREFIX), self._beside(manifest.REPLACED_PREFIX)
        if not os.path.isdir(ready) and not os.path.isdir(replaced):
            return
        if os.path.lexists(os.path.join(ready, manifest.PUBLISHING_MARKER)) and os.path.lexists(self.location):
            if not exchange(ready, self.location):
                os.rename(self.location, replaced)
        if not os.path.lexists(self.location):
            os.rename(ready if os.path.isdir(ready) else replaced, self.location)
        if os.path.isdir(ready):
            os.rename(ready, replaced)
        sync_folder(os.path.dirname(self.location))
        # It marks the newer of two folders, so it must be gone before the next exchange.
        Path(self.location, manifest.PUBLISHING_MARKER).unlink(missing_ok=True)
        if os.path.isdir(replaced):
            _remove_parts(replaced)
            _carry_over(replaced, self.location)
            shutil.rmtree(replaced, ignore_errors=True)

    def remove(self) -> None:
        """Remove the checkpoint; it is out of sight before its first file goes."""
        with self._locked():
            hidden = self._beside(manifest.REMOVED_PREFIX)
            os.rename(self.location, hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what killed runs left among the checkpoints here."""
        left = [entry.name for entry in _scan(self.location) if entry.name.startswith(manifest.OF_SAVES)]
        for name in dict.fromkeys(entry.partition("_")[2] for entry in left):
            with contextlib.suppress(Busy), self.child(name)._locked(waits=False):
                pass  # it has removed what it found

    # -- one writer at a time ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self, waits: bool = True) -> Iterator[None]:
        """Hold the lock, which the system drops with the process; complete or remove what a killed one left."""
        path, owner = self._beside(manifest.LOCK_PREFIX), os.getpid()
        for tenths in itertools.count():
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            if _locks(descriptor, path):
                break
            os.close(descriptor)
            if tenths == 20:
                logger.warning("Another process is saving to %s; waiting for it.", self.location)
            if not waits or tenths >= 10 * PATIENCE_S:
                raise Busy(
                    f"Another process has been saving to {self.location!r} for {tenths / 10:.0f} s: it holds {path!r}. Is a "
                    "former one still running? Machines of one run that share a disk leave save_on_each_node=True out."
                )
            time.sleep(0.1)
        try:
            if os.path.isdir(self._beside(manifest.READY_PREFIX)):
                logger.warning("%s: a save was interrupted while it was published; completing it.", self.location)
            self._complete()
            del self  # which has this generator: a storage that is dropped drops its lock at once
            yield
        finally:
            # A fork has the descriptor, too, and must not give up what is its parent's.
            if os.getpid() == owner:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            os.close(descriptor)


def _locks(descriptor: int, path: str) -> bool:
    """Lock a file (flock) unless another process has; return whether this process may go on."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (BlockingIOError, PermissionError, FileNotFoundError):  # the last: the former holder has removed the file
        return False
    except (OSError, ImportError):  # a file system without locks, or Windows
        return True


# -- files and folders -------------------------------------------------------------------------------------------------


def _scan(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder, by name; nothing if there is no such folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)
    return []


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _make_folder(path: str) -> None:
    """Make a folder and those above it, on the disk."""
    if not os.path.isdir(path):
        _make_folder(os.path.dirname(path))
        Path(path).mkdir(exist_ok=True)
        sync_folder(os.path.dirname(path))


def _remove(path: str) -> None:
    """Remove a file or a folder, if it is there."""
    if _is_folder(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _remove_parts(folder: str) -> None:
    """Remove a checkpoint's parts from a folder, the manifest last; all that stays is the user's own.

    The parts are what the manifest lists, and in the folder itself what has a name of checkpoints alone.
    """
    listed: list[str] = []
    with contextlib.suppress(FileNotFoundError, DamagedCheckpoint):
        listed += Manifest.read(folder).files
    unlisted = sorted({*os.listdir(folder)} - {name.split("/")[0] for name in listed})
    named = [entry for entry in unlisted if manifest.is_checkpoint_file(entry) or manifest.is_shard_file(entry)]
    # Without the manifest the next process could not distinguish the other parts from the user's own.
    for path in (os.path.join(folder, name) for name in (*listed, *named, manifest.PUBLISHING_MARKER, NAME)):
        inner = os.path.dirname(path)
        if os.path.realpath(inner) == inner:  # what a link leads to is the user's own
            _remove(path)
            with contextlib.suppress(OSError):  # something else is in it
                os.removedirs(inner)


def _carry_over(former: str, folder: str) -> None:
    """Move what is the user's own from the folder that was replaced to the one that replaced it, and overwrite nothing."""
    for entry in _scan(former):
        target = os.path.join(folder, entry.name)
        if _is_folder(entry.path) and _is_folder(target):
            _carry_over(entry.path, target)
            continue
        if os.path.lexists(target):
            number = next(number for number in itertools.count(1) if not os.path.lexists(f"{target}.former_{number}"))
            message = "%s was written to while a checkpoint took its folder; what it was before is %s.former_%d."
            logger.warning(message, target, target, number)
            target = f"{target}.former_{number}"
        os.rename(entry.path, target)
