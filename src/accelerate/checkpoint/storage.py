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
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from accelerate.checkpoint import names
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, problems
from accelerate.runtime.durable import exchange, sync_folder, sync_tree

logger = logging.getLogger(__name__)

# How long a save waits for another process to let go of the place: a save in the background ends by itself, and a worker process of a
# killed run may outlive it a little.
PATIENCE_S = 60.0


class Busy(RuntimeError):
    """Another process saves to the location."""


@dataclass(frozen=True)
class State:
    """What lies at a location.

    Attributes:
        kind: ``"complete"`` with a manifest and its files; ``"foreign"`` for a folder of another library or of an older
            version, which cannot be verified; ``"incomplete"`` for what must not be loaded; ``"absent"`` for nothing.
        reason: why it is not complete.
        manifest: if it is complete, or if the manifest could be read.
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
    """A file, or a folder with all that is in it.

    Attributes:
        size: in bytes.
        modified: when it was last written, in seconds since 1970; None where that is not known.
    """

    size: int
    modified: float | None = None


@dataclass(unsafe_hash=True)
class CheckpointStorage(ABC):
    """Where a checkpoint is, or will be.

    Args:
        location: absolute path or URL, without a slash at its end.

    Attributes:
        shared: whether every process that reaches the location sees what one of them stages.
        generation: the name of what is being staged, where processes that stage apart have to agree on one.
    """

    location: str
    shared: ClassVar[bool] = True
    generation: str | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The last part of the location."""
        return os.path.basename(self.location.rstrip("/"))

    def join(self, generation: str) -> None:
        """Stage for the same checkpoint as the process that has this generation."""
        return

    def upload(self, staged: str) -> None:
        """Bring a staged folder to the location, unseen; where staging is not shared, before one rank publishes."""
        return

    @abstractmethod
    def child(self, name: str) -> "CheckpointStorage":
        """Return the storage of that name inside this one."""

    @abstractmethod
    def parent(self) -> "CheckpointStorage":
        """Return the storage that this one lies in."""

    @abstractmethod
    def state(self) -> State:
        """Return what lies here, without reading the files themselves. Any rank, alone."""

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
        """Return a local folder with the checkpoint's files.

        Args:
            wanted: which of them, by their path in the manifest; all by default.
        """

    def release(self) -> None:
        """Remove what `fetch` made, if that was a copy."""
        return

    @abstractmethod
    def remove(self) -> None:
        """Remove the checkpoint; no reader sees a part of it meanwhile."""

    def sweep(self) -> list[str]:
        """Remove what killed runs left among the checkpoints here, and return it; only a process that writes here calls it."""
        return []

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
        numbered = [(names.number_of(entry.name), entry) for entry in self.entries()]
        return sorted((pair for pair in numbered if pair[0] is not None), key=lambda pair: pair[0])


def storage_of(path: str | os.PathLike[str]) -> CheckpointStorage:
    """Return the storage of a path or URL.

    Args:
        path: a local path, a ``file://`` URL, or a URL that fsspec understands, such as ``s3://bucket/run``.

    Raises:
        ImportError: the URL needs fsspec or a package that it names.
    """
    text = os.path.expanduser(os.fspath(path)).removeprefix("file://").removeprefix("local://")
    if "://" in text:
        from accelerate.checkpoint.object_store import ObjectStore

        return ObjectStore(text.rstrip("/"))
    return LocalStorage(text)


# -- a run's checkpoints -----------------------------------------------------------------------------------------------


def newest_first(folder: CheckpointStorage) -> tuple[list[CheckpointStorage], list[str]]:
    """Return the checkpoints in a folder that may be loaded, newest first, and what was passed over. Any rank, alone.

    Args:
        folder: where numbered checkpoints are, or a checkpoint itself.

    Returns:
        The checkpoints, and a line for each one that is not complete.
    """
    states = [(storage, storage.state()) for _, storage in reversed(folder.checkpoints())]
    if all(state.kind == "absent" for _, state in states):
        state = folder.state()
        states = (
            [(folder, state)] if state.kind == "complete" or (state.kind == "incomplete" and folder.files()) else []
        )
    found = [storage for storage, state in states if state.loads]
    return found, [f"{storage.location}: {state.reason}" for storage, state in states if state.kind == "incomplete"]


def prune(folder: CheckpointStorage, limit: int | None, keep: Iterable[str | None]) -> list[str]:
    """Remove the oldest checkpoints beyond a limit, once the newest one is at its location. One rank per file system calls it.

    Only complete ones count and go, and what killed saves left; a damaged checkpoint stays, so that it can be looked at.

    Args:
        folder: where the checkpoints are.
        limit: how many complete ones stay, at least one; None keeps all.
        keep: locations of checkpoints that stay whatever their number: the one just written, and the one the run began from.

    Returns:
        The locations removed.
    """
    kept = set(keep)
    removed = folder.sweep()
    if limit is None:
        return removed
    # What a link leads to is not ours to remove.
    whole = [storage for _, storage in folder.checkpoints() if storage.parent() == folder and storage.state().loads]
    surplus = max(0, len(whole) - max(limit, 1))
    for storage in [storage for storage in whole if storage.location not in kept][:surplus]:
        logger.info("Removing the checkpoint %s (total_limit=%d).", storage.location, limit)
        try:
            storage.remove()
            removed.append(storage.location)
        except OSError as error:  # the new checkpoint is whole all the same
            logger.warning("The checkpoint %s could not be removed: %s", storage.location, error)
    return removed


# -- folders -----------------------------------------------------------------------------------------------------------


class LocalStorage(CheckpointStorage):
    """A folder of a file system that is mounted here.

    A checkpoint called X changes places by hidden folders beside it, in the order of a publish::

        .saving_X    being written; worth nothing if its writer is gone
        .ready_X     whole, with the file .publishing in it: the new one, about to take the location;
                     without that file: the former one, which the new one was exchanged with
        .replaced_X  the former one, until what is the user's own in it is in the new one
        .removed_X   being removed

    A folder that cannot be renamed is filled in place: .saving_, .ready_ and .removed_ lie in it, and .ready_ is the checkpoint
    until all of it is in the folder, too. The file .lock_X, or .lock_ in the folder, is locked while a process saves or removes.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # What a link points to is replaced, not the link.
        super().__init__(os.path.realpath(path))
        self._staged = ""
        self._save = contextlib.ExitStack()  # when it is closed, the staged folder goes, and then the lock

    def child(self, name: str) -> "LocalStorage":
        """Return the storage of that name inside this one."""
        return LocalStorage(os.path.join(self.location, name))

    def parent(self) -> "LocalStorage":
        """Return the storage that this one lies in."""
        return LocalStorage(os.path.dirname(self.location))

    def _inside(self, prefix: str) -> str:
        return os.path.join(self.location, prefix)

    def _beside(self, prefix: str) -> str:
        folder, name = os.path.split(self.location)
        return os.path.join(folder, prefix + name)

    def _hidden(self, prefix: str) -> str:
        """Beside the folder, or inside where it cannot be renamed: it is mounted, its parent is not ours, or the process is in it."""
        parent = os.path.dirname(self.location)
        try:
            here = Path.cwd()
        except FileNotFoundError:  # it was removed
            here = Path(parent)
        fixed = here.is_relative_to(self.location) or os.path.ismount(self.location)
        fixed = fixed or not os.access(parent, os.W_OK | os.X_OK)
        return self._inside(prefix) if fixed and os.path.isdir(self.location) else self._beside(prefix)

    def _readable(self) -> str:
        """Where the checkpoint is: at its location, or where a publish that was killed between two steps left it."""
        inside, ready = self._inside(names.READY_PREFIX), self._beside(names.READY_PREFIX)
        found = filter(os.path.isdir, (inside, self.location, ready, self._beside(names.REPLACED_PREFIX)))
        return next(found, self.location)

    def state(self) -> State:
        """Return what lies here. Any rank, alone."""
        folder = self._readable()
        try:
            entries = os.listdir(folder)
            if any(entry.startswith(names.INCOMPLETE_MARKER) for entry in entries):
                return State("incomplete", "its saving did not come to its end")
            manifest = Manifest.read(folder) if NAME in entries else None
        except FileNotFoundError:
            return State("absent", "there is no such folder")
        except NotADirectoryError:
            return State("absent", "it is a file")
        except DamagedCheckpoint as error:
            return State("incomplete", str(error))
        if manifest is not None:
            found = problems(folder, manifest)
            return State("incomplete" if found else "complete", "; ".join(found), manifest)
        if not entries:
            return State("incomplete", "the folder is empty")
        if any(names.is_generators_file(entry) for entry in entries):
            return State("incomplete", f"its manifest {NAME} is missing")
        return State("foreign", "it has no manifest: another library or an older version saved it")

    def entries(self) -> list[CheckpointStorage]:
        """Return the folders that lie here, by name; hidden ones are left out.

        Of links those count that are named as a checkpoint is; their location is where they lead to, which may be elsewhere.
        """
        folders = [entry for entry in _scan(self.location) if entry.is_dir()]
        shown = [entry.name for entry in folders if not entry.is_symlink() or names.number_of(entry.name) is not None]
        found = {name.removeprefix(names.READY_PREFIX).removeprefix(names.REPLACED_PREFIX) for name in shown}
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
        for path, folders, files in os.walk(self._readable()):
            for name in (".", *folders, *files):
                with contextlib.suppress(OSError):  # it was removed just now
                    about = os.lstat(os.path.join(path, name))
                    modified = max(modified, about.st_mtime)
                    size += about.st_size if name in files else 0
        return Stored(size, modified)

    def leftovers(self) -> dict[str, Stored]:
        """Return the hidden folders of saves and removals in here, by path."""
        hidden = [entry.path for entry in _scan(self.location) if entry.name.startswith(names.HIDDEN_PREFIXES)]
        return {path: LocalStorage(path).stored() for path in hidden if _is_folder(path)}

    def fetch(self, wanted: Callable[[str], bool] | None = None) -> str:
        """Return the folder itself."""
        return self._readable()

    # -- publishing ----------------------------------------------------------------------------------------------------

    def stage(self) -> str:
        """Make the hidden folder, empty, beside this one, or in it where this one cannot be renamed.

        Raises:
            NotADirectoryError: a file has the location.
            Busy: another process is saving here.
        """
        if os.path.exists(self.location) and not os.path.isdir(self.location):
            raise NotADirectoryError(f"A checkpoint cannot take the place of a file: {self.location!r} is one.")
        _make_folder(os.path.dirname(self.location))
        self.abandon()
        with contextlib.ExitStack() as save:
            save.enter_context(self._locked())
            for hidden in (self._beside, self._inside):
                _remove(hidden(names.STAGING_PREFIX))
                _remove(hidden(names.REMOVED_PREFIX))
            self._staged = self._hidden(names.STAGING_PREFIX)
            os.mkdir(self._staged)
            save.callback(shutil.rmtree, self._staged, ignore_errors=True)
            self._save = save.pop_all()
        return self._staged

    def abandon(self) -> None:
        """Remove what was staged."""
        self._save.close()

    def publish(self) -> None:
        """Let what was staged, whose files are on the disk, take the location. All in it but the parts of a checkpoint stays."""
        sync_tree(self._staged)
        in_place = os.path.dirname(self._staged) == self.location  # whatever the working directory is by now
        if in_place or not os.path.lexists(self.location):
            os.rename(self._staged, self._inside(names.READY_PREFIX) if in_place else self.location)
            sync_folder(os.path.dirname(self._staged))
        else:
            with contextlib.suppress(OSError):
                shutil.copymode(self.location, self._staged)
            Path(self._staged, names.PUBLISHING_MARKER).touch()
            os.rename(self._staged, self._beside(names.READY_PREFIX))
        self._complete()
        self._save.close()

    def _complete(self) -> None:
        """Bring a publish to its end from whichever step it has come to. Only the process that holds the lock calls it."""
        ready, replaced = self._beside(names.READY_PREFIX), self._beside(names.REPLACED_PREFIX)
        if os.path.isdir(inside := self._inside(names.READY_PREFIX)):
            self._fill(inside)
        if not os.path.isdir(ready) and not os.path.isdir(replaced):
            return
        if os.path.lexists(os.path.join(ready, names.PUBLISHING_MARKER)):
            if os.path.lexists(self.location) and not exchange(ready, self.location):
                os.rename(self.location, replaced)
            if not os.path.lexists(self.location):
                os.rename(ready, self.location)
        if os.path.isdir(ready):
            os.rename(ready, replaced)
        if not os.path.lexists(self.location):
            os.rename(replaced, self.location)
        sync_folder(os.path.dirname(self.location))
        # It must be gone before the next exchange, whose two sides it tells apart.
        Path(self.location, names.PUBLISHING_MARKER).unlink(missing_ok=True)
        if os.path.isdir(replaced):
            _carry_over(replaced, self.location)
            _discard(replaced, self._beside(names.REMOVED_PREFIX))

    def _fill(self, ready: str) -> None:
        """Put a checkpoint that lies in this folder into its place file by file."""
        for name in _parts(self.location):
            path = os.path.join(self.location, name)
            _remove(path)
            with contextlib.suppress(OSError):  # something else is in it
                os.removedirs(os.path.dirname(path))
        _duplicate(ready, self.location)
        _discard(ready, self._inside(names.REMOVED_PREFIX))

    def remove(self) -> None:
        """Remove the checkpoint; it is out of sight before its first file goes."""
        with self._locked():
            _discard(self.location, self._beside(names.REMOVED_PREFIX))

    def sweep(self) -> list[str]:
        """Remove what killed runs left among the checkpoints here, and return the paths."""
        removed = []
        hidden = (*names.HIDDEN_PREFIXES, names.LOCK_PREFIX)
        left = [entry.name for entry in _scan(self.location) if entry.name.startswith(hidden)]
        for name in dict.fromkeys(entry.partition("_")[2] for entry in left):
            with contextlib.suppress(Busy), self.child(name)._locked(patience_s=0):
                for prefix in (names.STAGING_PREFIX, names.REMOVED_PREFIX):
                    if os.path.isdir(path := self._inside(prefix + name)):
                        shutil.rmtree(path, ignore_errors=True)
                        removed.append(path)
        return removed

    # -- one writer at a time ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self, patience_s: float | None = None) -> Iterator[None]:
        """Hold the lock, which the system drops with the process, and complete what a killed one left."""
        patience_s = PATIENCE_S if patience_s is None else patience_s
        path, owner = self._hidden(names.LOCK_PREFIX), os.getpid()
        for tenths in itertools.count():
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            if _locks(descriptor, path):
                break
            os.close(descriptor)
            if tenths == 20:
                logger.warning("Another process is saving to %s; waiting for it.", self.location)
            if tenths >= 10 * patience_s:
                raise Busy(
                    f"Another process has been saving to {self.location!r} for {tenths / 10:.0f} s: it holds {path!r}. Only one "
                    "run at a time may save there; is a former one still running? If it is another machine of this run, leave "
                    "save_on_each_node=True out: it is for machines with disks of their own."
                )
            time.sleep(0.1)
        try:
            if any(map(os.path.isdir, (self._beside(names.READY_PREFIX), self._inside(names.READY_PREFIX)))):
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
    """Lock a file unless another process has; return whether this process may go on.

    Source:
        https://man7.org/linux/man-pages/man2/flock.2.html
    """
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
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
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


def _discard(folder: str, hidden: str) -> None:
    """Remove a folder in one step for readers: a part of it would be taken for the checkpoint, or for the user's own."""
    shutil.rmtree(hidden, ignore_errors=True)  # of a process that was killed just here
    os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _duplicate(source: str, target: str) -> None:
    """Give a file, or all in a folder, a second name, or make a copy on the disk where the file system has no links."""
    if os.path.isdir(source):
        if not _is_folder(target):
            _remove(target)
            os.mkdir(target)
        for entry in sorted(os.listdir(source)):
            _duplicate(os.path.join(source, entry), os.path.join(target, entry))
        sync_folder(target)
        return
    _remove(target)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())


def _parts(folder: str) -> list[str]:
    """Paths of what belongs to the checkpoint in a folder, the manifest last; all else there is the user's own.

    The parts are what the manifest lists, and in the folder itself what has a name that only files of checkpoints have.
    """
    listed: list[str] = []
    with contextlib.suppress(FileNotFoundError, DamagedCheckpoint):
        listed += Manifest.read(folder).files
    unlisted = {*os.listdir(folder)} - {name.split("/")[0] for name in listed}
    named = [entry for entry in sorted(unlisted) if names.is_checkpoint_file(entry) or names.is_shard_file(entry)]
    # Without the manifest the next process could not tell the other parts from the user's own.
    return [*listed, *named, names.PUBLISHING_MARKER, NAME]


def _carry_over(former: str, folder: str) -> None:
    """Move what is the user's own from the folder that was replaced to the one that replaced it, and overwrite nothing."""
    parts = {*_parts(former), names.LOCK_PREFIX}
    mixed = {name[:index] for name in parts for index, sign in enumerate(name) if sign == "/"}

    def carry(name: str) -> None:
        source, target = os.path.join(former, name), os.path.join(folder, name)
        if name in parts:
            return
        if _is_folder(source) and (_is_folder(target) or (name in mixed and not os.path.lexists(target))):
            for entry in os.listdir(source):
                carry(f"{name}/{entry}".lstrip("/"))
            return
        if os.path.lexists(target):
            number = next(number for number in itertools.count(1) if not os.path.lexists(f"{target}.former_{number}"))
            message = "%s was written to while a checkpoint took its folder; what it was before is %s.former_%d."
            logger.warning(message, target, target, number)
            target = f"{target}.former_{number}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(source, target)

    carry("")
