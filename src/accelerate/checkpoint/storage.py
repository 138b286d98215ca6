"""Where a checkpoint lies, and how it gets there: written aside, then published in one move.

A checkpoint is written into a hidden folder beside its place. When all of it is there, the manifest too, and every byte has
reached the disk, the hidden folder takes the place: by one rename, or, where an older checkpoint has the place, by exchanging
the two. Whoever looks sees the old one or the new one, and never a part. A publish that is killed between two steps is
completed, or undone, by whoever touches the place next.
"""

import contextlib
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from accelerate.checkpoint import names
from accelerate.checkpoint.lock import Busy, Lock
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, problems
from accelerate.checkpoint.own import carry, clear_away, duplicate, make_folders, users_own
from accelerate.runtime.durable import exchange, sync_folder, sync_tree

logger = logging.getLogger(__name__)

Path = str | os.PathLike[str]


@dataclass(frozen=True)
class State:
    """What lies at a place.

    Attributes:
        kind: ``"complete"`` with a manifest and its files; ``"foreign"`` for a folder of another library or of an older
            version, which cannot be verified; ``"incomplete"`` for what nobody should load; ``"absent"`` for nothing.
        reason: why it is not complete.
        manifest: if it is complete, or if that could be read.
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
    """A file at a place, or a folder with all that is in it.

    Attributes:
        size: in bytes.
        modified: when it was last written, in seconds since 1970; None where that is not known.
    """

    size: int
    modified: float | None = None


class CheckpointStorage(ABC):
    """Where a checkpoint is, or will be.

    Args:
        location: absolute path or URL, without a slash at its end.
    """

    def __init__(self, location: str) -> None:
        self.location = location

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.location == self.location

    def __hash__(self) -> int:
        return hash(self.location)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r})"

    @property
    def shared(self) -> bool:
        """Whether every process that reaches the place sees what one of them stages."""
        return True

    @property
    def generation(self) -> str | None:
        """The name of what is being staged here, where processes that stage apart have to agree on one."""
        return None

    def join(self, generation: str) -> None:
        """Stage for the same checkpoint as another process.

        Args:
            generation: that process's.
        """
        return

    def upload(self, staged: str) -> None:
        """Bring what a node has staged to the place, unseen; where staging is not shared, before one rank publishes.

        Args:
            staged: path of the staged folder.
        """
        return

    @property
    def name(self) -> str:
        """The last part of the location."""
        return self.location.rstrip("/").rsplit("/", 1)[-1]

    @abstractmethod
    def child(self, name: str) -> "CheckpointStorage":
        """Return the place of that name inside this one."""

    @abstractmethod
    def parent(self) -> "CheckpointStorage":
        """Return the place that this one lies in."""

    @abstractmethod
    def state(self) -> State:
        """Say what lies here, without reading the files themselves. Any rank, alone."""

    @abstractmethod
    def entries(self) -> list["CheckpointStorage"]:
        """Return the folders that lie here, by name; hidden ones are left out."""

    @abstractmethod
    def files(self) -> dict[str, Stored]:
        """Return the files that lie directly here, hidden ones too, by name; nothing if there is no such place."""

    @abstractmethod
    def stage(self, save: str = "") -> str:
        """Make the empty local folder in which the next checkpoint is written. One process per file system.

        Args:
            save: name of the save, the same on all machines.
        """

    @abstractmethod
    def staging(self) -> str:
        """Return the path of that folder; all ranks of a node see the same."""

    @abstractmethod
    def publish(self) -> None:
        """Let what was staged, manifest included, take this place. The process that staged it calls this."""

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
        """Remove the checkpoint; nobody sees a part of it meanwhile."""

    def sweep(self) -> list[str]:
        """Remove what killed runs left among the checkpoints here; only a process that writes here calls it.

        Returns:
            What was removed.
        """
        return []

    @abstractmethod
    def size(self) -> int:
        """Return the bytes of all files here."""

    def stored(self) -> Stored:
        """Return the bytes of all that is here, and when any of it was last written to, where that is known."""
        found = [*self.files().values(), *(entry.stored() for entry in self.entries())]
        modified = max((stored.modified for stored in found if stored.modified is not None), default=None)
        return Stored(sum(stored.size for stored in found), modified)

    def leftovers(self) -> dict[str, Stored]:
        """Return what saves and removals in here left behind, or are at work on right now, by location."""
        return {}

    def checkpoints(self) -> list[tuple[int, "CheckpointStorage"]]:
        """Return the automatically named checkpoints here, whole or not, as pairs of number and place, oldest first."""
        found = [(names.number_of(entry.name), entry) for entry in self.entries()]
        return sorted(
            ((number, entry) for number, entry in found if number is not None),
            key=lambda pair: (pair[0], pair[1].name),
        )


def storage_of(path: Path) -> CheckpointStorage:
    """Return the place of a path or URL.

    Args:
        path: a local path, a ``file://`` URL, or a URL that fsspec understands, such as ``s3://bucket/run``.

    Raises:
        ImportError: the URL needs fsspec or a package that it names.
    """
    text = os.path.expanduser(os.fspath(path))
    for scheme in ("file://", "local://"):
        text = text.removeprefix(scheme)
    if "://" in text:
        from accelerate.checkpoint.object_store import ObjectStore

        return ObjectStore(text.rstrip("/"))
    return LocalStorage(text)


class LocalStorage(CheckpointStorage):
    """A folder of a file system that is mounted here.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        # What a link points to is replaced, not the link.
        super().__init__(os.path.realpath(path))
        self._staged: str | None = None
        self._lock: Lock | None = None

    @property
    def name(self) -> str:
        """The folder's name."""
        return os.path.basename(self.location)

    def child(self, name: str) -> "LocalStorage":
        """Return the place of that name inside this one."""
        return LocalStorage(os.path.join(self.location, name))

    def parent(self) -> "LocalStorage":
        """Return the place that this one lies in."""
        return LocalStorage(os.path.dirname(self.location))

    def _inside(self, prefix: str) -> str:
        return os.path.join(self.location, prefix)

    def _beside(self, prefix: str) -> str:
        return os.path.join(os.path.dirname(self.location), prefix + self.name)

    @property
    def _in_place(self) -> bool:
        """Whether the folder cannot be exchanged: it is mounted, its parent is not ours, or we stand in it."""
        if not os.path.isdir(self.location):
            return False
        try:
            here = os.path.realpath(os.getcwd())
        except OSError:  # it is gone
            here = ""
        return (
            os.path.ismount(self.location)
            or not os.access(os.path.dirname(self.location), os.W_OK | os.X_OK)
            or f"{here}{os.sep}".startswith(f"{self.location.rstrip(os.sep)}{os.sep}")
        )

    def _readable(self) -> str:
        """Where this checkpoint can be read: here, or where a publish that was killed between two steps left it."""
        if os.path.isdir(inside := self._inside(names.READY_PREFIX)):
            return inside
        if not os.path.lexists(self.location):
            ready, replaced = self._beside(names.READY_PREFIX), self._beside(names.REPLACED_PREFIX)
            if os.path.isdir(ready):
                return ready
            if os.path.isdir(replaced):
                return replaced
        return self.location

    # -- looking ---------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Say what lies here. Any rank, alone."""
        folder = self._readable()
        try:
            entries = os.listdir(folder)
        except FileNotFoundError:
            return State("absent", "there is no such folder")
        except NotADirectoryError:
            return State("absent", "it is a file")
        if any(entry.startswith(names.INCOMPLETE_MARKER) for entry in entries):
            return State("incomplete", "its saving did not come to its end")
        if NAME in entries:
            try:
                manifest = Manifest.read(folder)
            except DamagedCheckpoint as error:
                return State("incomplete", str(error))
            except FileNotFoundError:
                return State("absent", "it was removed just now")
            found = problems(folder, manifest)
            return State("incomplete", "; ".join(found), manifest) if found else State("complete", "", manifest)
        if not entries:
            return State("incomplete", "the folder is empty")
        if any(names.is_generators_file(entry) for entry in entries):
            return State("incomplete", f"its manifest {NAME} is missing")
        return State("foreign", "it has no manifest: another library or an older version saved it")

    def entries(self) -> list[CheckpointStorage]:
        """Return the folders that lie here, by name; hidden ones are left out.

        Of links those count that are named as a checkpoint is; their places are where they lead to, which may be elsewhere.
        """
        found = set()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.location) as entries:
            for entry in entries:
                if not entry.is_dir() or (entry.is_symlink() and names.number_of(entry.name) is None):
                    continue
                if not entry.name.startswith("."):
                    found.add(entry.name)
                for prefix in (names.READY_PREFIX, names.REPLACED_PREFIX):
                    if entry.name.startswith(prefix) and entry.name != prefix:
                        found.add(entry.name.removeprefix(prefix))
        places = dict.fromkeys(self.child(name) for name in sorted(found))
        return list(places)

    def files(self) -> dict[str, Stored]:
        """Return the files that lie directly here, by name."""
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._readable()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # it was removed just now
                    if entry.is_file():
                        found[entry.name] = Stored(entry.stat().st_size, entry.stat().st_mtime)
        return found

    def stored(self) -> Stored:
        """Return the bytes of all that is here, and when it was last written to."""
        return _stored(self._readable())

    def leftovers(self) -> dict[str, Stored]:
        """Return the hidden folders of saves and removals in here, by path."""
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.location) as entries:
            for entry in entries:
                if entry.name.startswith(names.HIDDEN_PREFIXES) and entry.is_dir(follow_symlinks=False):
                    found[entry.path] = _stored(entry.path)
        return dict(sorted(found.items()))

    def size(self) -> int:
        """Return the bytes of all files here."""
        return _stored(self._readable()).size

    def fetch(self, wanted: Callable[[str], bool] | None = None) -> str:
        """Return the folder itself."""
        return self._readable()

    # -- publishing ------------------------------------------------------------------------------------------------
    #
    # .saving_X   being written; worth nothing if its writer is gone
    # .ready_X    whole, about to take the place; with the file .publishing in it, it is the new one, else the former one
    # .replaced_X the former one, about to be removed once what is the user's own has been taken out of it
    # .removed_X  being removed
    #
    # In a folder that cannot be exchanged, .saving_, .ready_ and .removed_ lie in it. Its .ready_ is the checkpoint until all
    # of that is in the folder, too.

    def staging(self) -> str:
        """Return the path of the hidden folder: beside this one, or in it where this one cannot be exchanged."""
        if self._staged is not None:  # wherever we stand by now
            return self._staged
        if self._in_place:
            return self._inside(names.STAGING_PREFIX)
        return self._beside(names.STAGING_PREFIX)

    def stage(self, save: str = "") -> str:
        """Make the hidden folder, empty. One process per file system.

        Args:
            save: name of the save, the same on all machines.

        Raises:
            NotADirectoryError: a file has the place.
            Busy: somebody else is saving here.
        """
        if os.path.exists(self.location) and not os.path.isdir(self.location):
            raise NotADirectoryError(f"A checkpoint cannot take the place of a file: {self.location!r} is one.")
        made = make_folders(os.path.dirname(self.location))
        self._unlock()  # of a save that was given up
        lock = self._locking()
        lock.take(save)
        self._lock = lock
        try:
            self.recover()
            self._staged = None
            folder = self.staging()
            for left in (folder, self._beside(names.REMOVED_PREFIX), *map(self._inside, names.HIDDEN_PREFIXES)):
                if os.path.lexists(left):
                    shutil.rmtree(left)
            os.mkdir(folder)
        except BaseException:
            self._unlock()
            raise
        for path in made:
            sync_folder(os.path.dirname(path))
        self._staged = folder
        return folder

    def _locking(self) -> Lock:
        path = self._inside(names.LOCK_PREFIX) if self._in_place else self._beside(names.LOCK_PREFIX)
        return Lock(path, self.location)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def abandon(self) -> None:
        """Remove what was staged."""
        if self._staged is not None:  # what lies there otherwise is another one's
            shutil.rmtree(self._staged, ignore_errors=True)
            self._staged = None
        self._unlock()

    def publish(self) -> None:
        """Let what was staged take this place.

        The staged folder has its manifest, and its files have been written to the disk. What the folder here has beyond its
        own manifest belongs to the user and is carried over.

        Raises:
            OSError: the file system refuses; what was here before is still here.
        """
        staged = self.staging()
        sync_tree(staged)
        self._take_place(staged)
        self._staged = None
        self._unlock()

    def _take_place(self, staged: str) -> None:
        if os.path.dirname(staged) == self.location:
            ready = self._inside(names.READY_PREFIX)
            os.rename(staged, ready)
            sync_folder(self.location)
            self._spread(ready)
            return
        parent = os.path.dirname(self.location)
        if not os.path.lexists(self.location):
            os.rename(staged, self.location)
            sync_folder(parent)
            return
        with contextlib.suppress(OSError):
            shutil.copymode(self.location, staged)
        with open(os.path.join(staged, names.PUBLISHING_MARKER), "w"):
            pass
        ready = self._beside(names.READY_PREFIX)
        os.rename(staged, ready)
        self._replace(ready)

    def _replace(self, ready: str) -> None:
        replaced = self._beside(names.REPLACED_PREFIX)
        if os.path.lexists(self.location):
            if exchange(ready, self.location):
                os.rename(ready, replaced)
            else:
                os.rename(self.location, replaced)
        if os.path.lexists(ready):
            os.rename(ready, self.location)
        sync_folder(os.path.dirname(self.location))
        self._finish(replaced)

    def _finish(self, replaced: str) -> None:
        """Carry over what is the user's own out of the folder that was replaced, and remove that."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.location, names.PUBLISHING_MARKER))
        for name in users_own(replaced):
            carry(os.path.join(replaced, name), os.path.join(self.location, name))
        # One step: of half a folder nobody could tell what is the user's own.
        self._discard(replaced, self._beside(names.REMOVED_PREFIX))

    @staticmethod
    def _discard(folder: str, hidden: str) -> None:
        shutil.rmtree(hidden, ignore_errors=True)  # of a run that was killed just here
        if os.path.lexists(folder):
            os.rename(folder, hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def _spread(self, ready: str) -> None:
        """Put a checkpoint that lies in this folder into its place file by file; it is whole where it lies meanwhile."""
        own, new = frozenset(users_own(self.location)), os.listdir(ready)
        parts = [
            entry
            for entry in os.listdir(self.location)
            if entry not in (*own, NAME, names.READY_PREFIX, names.LOCK_PREFIX)
        ]
        # The manifest goes last, for it says what else belongs to the former one, and comes last.
        for entry in dict.fromkeys([*parts, *(entry for entry in new if entry != NAME), NAME]):
            clear_away(self.location, entry, own)
        for entry in sorted(new, key=lambda entry: entry == NAME):
            duplicate(os.path.join(ready, entry), os.path.join(self.location, entry))
        sync_folder(self.location)
        self._discard(ready, self._inside(names.REMOVED_PREFIX))

    def recover(self) -> None:
        """Complete what a process left that was killed while it published here; usually there is nothing to do.

        Only the process that is going to write here calls it: to others, a publish that is going on looks the same.
        """
        ready, replaced = self._beside(names.READY_PREFIX), self._beside(names.REPLACED_PREFIX)
        inside = self._inside(names.READY_PREFIX)
        if os.path.isdir(ready) or os.path.isdir(inside):
            logger.warning("%s: a save was interrupted while it was published; completing it.", self.location)
        if os.path.isdir(inside):
            self._spread(inside)
        if os.path.isdir(ready):
            if os.path.lexists(os.path.join(ready, names.PUBLISHING_MARKER)):
                self._replace(ready)
            else:
                if os.path.isdir(replaced):
                    self._finish(replaced)
                os.rename(ready, replaced)
        if os.path.isdir(replaced):
            if not os.path.lexists(self.location):
                os.rename(replaced, self.location)
            else:
                self._finish(replaced)

    def remove(self) -> None:
        """Remove the checkpoint; it is out of sight before its first file goes.

        Raises:
            Busy: somebody is saving here.
        """
        lock = self._locking()
        lock.take()
        try:
            hidden = self._beside(names.REMOVED_PREFIX)
            shutil.rmtree(hidden, ignore_errors=True)  # of a run that was killed while it removed one of this name
            os.rename(self.location if os.path.lexists(self.location) else self._readable(), hidden)
            # What a killed publish left beside it would take its place now.
            for prefix in (names.READY_PREFIX, names.REPLACED_PREFIX):
                shutil.rmtree(self._beside(prefix), ignore_errors=True)
            shutil.rmtree(hidden, ignore_errors=True)
        finally:
            lock.release()

    def sweep(self) -> list[str]:
        """Remove what killed runs left among the checkpoints here. Only the process that writes here calls it.

        Returns:
            The paths removed.
        """
        removed = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in sorted(os.listdir(self.location)):
                prefixes = (*names.HIDDEN_PREFIXES, names.LOCK_PREFIX)
                prefix = next((prefix for prefix in prefixes if entry.startswith(prefix)), None)
                if prefix is None:
                    continue
                lock = self.child(entry.removeprefix(prefix))._locking()
                try:
                    lock.take(patience_s=0)
                except Busy:  # it is being written
                    continue
                try:
                    if prefix in (names.READY_PREFIX, names.REPLACED_PREFIX):
                        self.child(entry.removeprefix(prefix)).recover()
                    elif os.path.isdir(path := os.path.join(self.location, entry)):
                        shutil.rmtree(path, ignore_errors=True)
                        removed.append(path)
                finally:
                    lock.release()
        return removed


def _stored(folder: str) -> Stored:
    """The bytes in a folder, and when it or anything in it was last written."""
    size, modified = 0, 0.0
    for path, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            with contextlib.suppress(OSError):  # it was removed just now
                about = os.lstat(os.path.join(path, name))
                modified = max(modified, about.st_mtime)
                size += about.st_size if name in files else 0
    return Stored(size, modified)
