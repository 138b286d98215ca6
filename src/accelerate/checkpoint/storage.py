"""Where a checkpoint lies, how it gets there in one step, and which checkpoints of a run stay.

A checkpoint is written into a hidden folder next to its location. When all of it is there, the manifest too, and every byte has
reached the disk, it takes the location: by one rename, or, where an older checkpoint is there, by exchanging the two. A
reader finds the old one or the new one, and never a part. A publish that is killed between two steps is completed by the
next process that writes to the location.
"""

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import posixpath
import shutil
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from accelerate.checkpoint import folders, manifest
from accelerate.checkpoint.folders import warned
from accelerate.checkpoint.manifest import (
    LOCK_PREFIX,
    NAME,
    DamagedCheckpoint,
    Manifest,
    UnreadableManifest,
    number_of,
    problems,
)
from accelerate.extension import imported, specs, third_parties
from accelerate.runtime.durable import (
    STAGING_PREFIX,
    DiskFile,
    HashedFile,
    exchange,
    sync_file,
    sync_folder,
    sync_tree,
)

logger = logging.getLogger(__name__)

Storage = TypeVar("Storage", bound="CheckpointStorage")

# How long a save waits for another process to release the lock: a save in the background ends by itself, and a worker process of a
# killed run may outlive it a little.
PATIENCE_S = 60.0
# How old a save is that no run can still be at work on, where nothing else tells.
ABANDONED_S = 24 * 3600.0


class Busy(RuntimeError):
    """Another process saves to the location."""


@dataclass(frozen=True)
class CheckpointStatus:
    """What is at a location, why it is not complete, and its manifest if that could be read.

    Attributes:
        kind: ``"complete"`` with a manifest and its files; ``"foreign"`` for a folder of another library or of an
            older version, which cannot be verified; ``"incomplete"`` for what must not be loaded; ``"absent"``.
        unread: it is incomplete here because its manifest cannot be read, though its saving came to its end.
    """

    kind: Literal["complete", "foreign", "incomplete", "absent"]
    reason: str = ""
    manifest: Manifest | None = None
    unread: bool = False

    @property
    def loads(self) -> bool:
        """Whether it may be loaded."""
        return self.kind in ("complete", "foreign")


@dataclass(frozen=True)
class FileStat:
    """The bytes of a file or folder, and when it was last written, in seconds since 1970; None where not known."""

    size: int
    modified: float | None = None


@dataclass(unsafe_hash=True)
class CheckpointStorage(ABC):
    """Where a checkpoint is, or will be: an absolute path or URL, without a slash at its end.

    Attributes:
        shared: whether every process that reaches the location sees what one of them stages.
        unresolved: the location without links resolved, by which ranks compare their calls: a link may change between two of them.
        fetched: the local folder that `fetch` made on this node, and the generation of what is in it; other ranks of the node
            take it over, so that they `bring` files of the same checkpoint.
    """

    location: str
    shared: ClassVar[bool] = True
    unresolved: str = field(default="", init=False, compare=False, repr=False)
    fetched: tuple[str, str] | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.unresolved = self.location

    @functools.cached_property
    def name(self) -> str:
        """The last part of the location."""
        return os.path.basename(self.location.rstrip("/"))

    def create(self, folder: str, name: str) -> HashedFile:
        """Give a file of a staged folder to write to; `sync` follows.

        Not a collective.
        """
        return HashedFile(DiskFile(os.path.join(folder, name)))

    def sync(self, folder: str, names: Iterable[str]) -> None:
        """Bring files of a staged folder to the disk, or to the store.

        Not a collective.
        """
        for name in names:
            sync_file(os.path.join(folder, name))

    def parts(self, folder: str, ranks: Iterable[int], written: int) -> dict[int, bytes]:
        """Return the parts of the manifest that ranks have left for a staged folder, by rank; there are `written` so many."""
        return manifest.parts(folder, ranks, written)

    def child(self: Storage, name: str) -> Storage:
        """Return the storage of that name inside this one."""
        return type(self)(posixpath.join(self.location, name))

    def parent(self) -> "CheckpointStorage":
        """Return the storage that this one is in; a root is in itself."""
        return type(self)(os.path.dirname(self.location))

    def state(self) -> CheckpointStatus:
        """Return what lies here, without reading the files themselves; OSError if the store fails.

        Not a collective.
        """
        former, state = None, self._look()
        while not state.loads and state != former:  # another save may take the place between two steps of a look
            former, state = state, self._look()
        return state

    def _look(self) -> CheckpointStatus:
        try:
            listing, found = self._verified()
        except FileNotFoundError:
            return CheckpointStatus("absent", "there is no such folder")
        except NotADirectoryError:
            return CheckpointStatus("absent", "it is a file")
        except DamagedCheckpoint as error:
            return CheckpointStatus("incomplete", str(error), unread=isinstance(error, UnreadableManifest))
        if listing is None:
            return CheckpointStatus("foreign", "it has no manifest: another library or an older version saved it")
        return CheckpointStatus("incomplete" if found else "complete", "; ".join(found), listing)

    @abstractmethod
    def _verified(self) -> tuple[Manifest | None, list[str]]:
        """Return the manifest, None for another library's save, and what is wrong with the names and sizes of files.

        FileNotFoundError for nothing, NotADirectoryError for a file, DamagedCheckpoint for what must not be loaded.
        """

    @abstractmethod
    def entries(self) -> Sequence["CheckpointStorage"]:
        """Return the folders that lie here, by name; hidden ones are omitted."""

    @abstractmethod
    def files(self) -> dict[str, FileStat]:
        """Return the files that lie directly here, hidden ones too, by name; nothing if there is no such location."""

    @abstractmethod
    def stage(self, save: str = "") -> str:
        """Make the empty local folder in which the next checkpoint is written. One process per file system.

        Args:
            save: A name of `manifest.save_name`, the same on all processes that stage parts of one checkpoint.
        """

    @abstractmethod
    def publish(self) -> None:
        """Let what was staged, manifest included, take the location. The process that staged it calls this, and then `discard`."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what was staged or, once that is published, what it replaced. What goes wrong is a warning.

        It may take long, so it comes when all ranks know what has become of the save. What a killed process leaves, the next save removes.
        """

    @abstractmethod
    def fetch(self, wanted: Callable[[str], bool] | None = None) -> str:
        """Return a local folder with the wanted files, by their path in the manifest; all by default."""

    def outline(self) -> tuple[str, Manifest | None]:
        """Return a local folder with all files, of which `bring` has to be asked for what is read, and the manifest if that was read."""
        return self.fetch(), None

    def bring(self, sizes: Mapping[str, int]) -> None:
        """Make sure that the fetched folder has some files, given with their sizes; any rank whose `fetched` is set, alone."""
        return

    def release(self) -> None:
        """Remove what `fetch` made, if that was a copy."""
        return

    @abstractmethod
    def remove(self) -> None:
        """Remove the checkpoint; no reader sees a part of it meanwhile."""

    @abstractmethod
    def sweep(self, older_than_s: float = ABANDONED_S) -> None:
        """Remove what killed runs left among the checkpoints here: what no run holds locked or, without locks, what is so old."""

    def stored(self) -> FileStat:
        """Return the bytes of all that is here, and when any of it was last written to, where that is known."""
        found = [*self.files().values(), *(entry.stored() for entry in self.entries())]
        modified = max((stored.modified for stored in found if stored.modified is not None), default=None)
        return FileStat(sum(stored.size for stored in found), modified)

    def leftovers(self) -> dict[str, FileStat]:
        """Return what saves and removals in here left behind, or are at work on right now, by location."""
        return {}

    def has_checkpoint_files(self) -> bool:
        """Return whether something here has a name that a checkpoint's files have, ours or another library's."""
        entries = [*self.files(), *(entry.name for entry in self.entries())]
        return any(entry == NAME or manifest.is_checkpoint_file(entry) for entry in entries)

    def is_empty(self) -> bool:
        """Return whether neither a file nor a visible folder is here."""
        return not (self.files() or self.entries())

    def counts(self, state: CheckpointStatus, foreign: bool = True) -> bool:
        """Return whether it is one of those of which pruning keeps some: complete or, with `foreign`, another library's, by its files."""
        return state.kind == "complete" or (foreign and state.kind == "foreign" and self.has_checkpoint_files())

    def checkpoints(self) -> list[tuple[int, "CheckpointStorage"]]:
        """Return the automatically named checkpoints here, whole or not, with their numbers, oldest first."""
        numbered = [(number, entry) for entry in self.entries() if (number := number_of(entry.name)) is not None]
        return sorted(numbered, key=lambda pair: pair[0])


def refuse_unfinished(entries: Collection[str]) -> None:
    """Raise DamagedCheckpoint if the names in a folder say that it must not be loaded: a save there has not ended."""
    if [entry for entry in entries if entry.startswith(manifest.INCOMPLETE_MARKER)]:
        raise DamagedCheckpoint("its saving did not come to its end")
    if NAME not in entries and any(map(manifest.is_ours_alone, entries)):
        raise DamagedCheckpoint(f"its manifest {NAME} is missing")


# -- a run's checkpoints -----------------------------------------------------------------------------------------------


def prune(
    folder: CheckpointStorage,
    limit: int | None,
    keep: Collection[str | None],
    listed: Callable[[], Iterable[CheckpointStorage]] | None = None,
) -> None:
    """Remove the oldest checkpoints beyond a limit (None: no limit), but for the locations to `keep`, and what killed saves left.

    One rank per file system calls it, once the newest one is at its location and all ranks know it: what goes wrong here is
    a warning. Those count and go of which `CheckpointStorage.counts` says so, or that load and are `listed`, oldest first. A damaged one
    stays, so that it can be looked at.
    """
    with warned(f"What killed saves left in {folder.location} could not be removed"):
        folder.sweep()
    if limit is None:
        return
    with warned(f"No older checkpoint in {folder.location} was removed, because they could not be listed"):
        found = listed() if listed else [one for _, one in folder.checkpoints()]
        # What a link leads to is not ours to remove.
        states = [(one, one.state()) for one in found if one.parent() == folder]
        whole = [one for one, state in states if (state.loads if listed else one.counts(state))]
        surplus = max(0, len(whole) - max(limit, 1))
        for storage in [one for one in whole if one.location not in keep][:surplus]:
            logger.info("Removing the checkpoint %s (total_limit=%d).", storage.location, limit)
            with warned(f"The checkpoint {storage.location} could not be removed"):
                storage.remove()


# -- folders -----------------------------------------------------------------------------------------------------------

# A longer name is hashed for the name of its lock: a file's name has 255 bytes at most, and less on some systems.
_LONGEST = 100


class LocalStorage(CheckpointStorage):
    """A folder of a file system that is mounted here; it need not exist.

    A checkpoint called X is saved and removed by way of a hidden folder next to it, whose name is random::

        .saving_0123456789abcdef/
            .accelerate_save   says X; a folder without that file is the user's own
            X                  being written; worth nothing if its writer is gone
            .former            the former one, until what is the user's own in it is in the new one; before the two are
                               exchanged, for a moment, the new one
            .removed           being removed

    The file .lock_X is locked while a process saves or removes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # What a link points to is replaced, not the link.
        super().__init__(os.path.realpath(path))
        self.unresolved = os.path.abspath(path)
        self._staged = ""
        self._aside = ""  # the hidden folder; also when what was staged in it has left it
        self._lock = contextlib.ExitStack()

    def entry(self, name: str) -> "LocalStorage":
        """Return the storage of an entry of this folder, not of what that leads to if it is a link."""
        storage = LocalStorage(self.location)
        storage.location = os.path.join(self.location, name)
        return storage

    def _verified(self) -> tuple[Manifest | None, list[str]]:
        folder = self.fetch()
        try:
            entries = os.listdir(folder)
        except PermissionError as error:
            raise UnreadableManifest(f"it cannot be read: {error.strerror}") from error
        if not entries:
            raise DamagedCheckpoint("the folder is empty")
        refuse_unfinished(entries)
        if NAME not in entries:
            return None, []
        listing = Manifest.read(folder)
        return listing, problems(folder, listing)

    def entries(self) -> list[CheckpointStorage]:
        """Return the visible folders here, by name; of links those named as a checkpoint, with where they lead to."""
        visible = [entry for entry in folders.scan(self.location) if folders.leads_to_folder(entry)]
        shown = {entry.name for entry in visible if not entry.is_symlink() or number_of(entry.name) is not None}
        hidden = folders.asides(self.location)
        shown |= {name for path, name in hidden if folders.is_folder(os.path.join(path, folders.FORMER))}
        return list(dict.fromkeys(self.child(name) for name in sorted(shown) if not name.startswith(".")))

    def has_checkpoint_files(self) -> bool:
        """Return whether something here has a name that a checkpoint's files have; not of a folder that cannot be read."""
        with contextlib.suppress(PermissionError):
            return super().has_checkpoint_files()
        return False

    def is_empty(self) -> bool:
        """Return whether nothing is here."""
        with contextlib.suppress(PermissionError):
            return super().is_empty()
        return False

    def files(self) -> dict[str, FileStat]:
        """Return the files that lie directly here, by name."""
        found = {}
        for entry in folders.scan(self.fetch()):
            with contextlib.suppress(OSError):  # it was removed just now
                if entry.is_file():
                    found[entry.name] = FileStat(entry.stat().st_size, entry.stat().st_mtime)
        return found

    def stored(self) -> FileStat:
        """Return the bytes of all that is here, and when it was last written to."""
        size, modified = 0, 0.0
        for path, _, files in os.walk(self.fetch()):
            for name in (".", *files):
                with contextlib.suppress(OSError):  # it was removed just now
                    about = os.lstat(os.path.join(path, name))
                    modified = max(modified, about.st_mtime)
                    size += about.st_size if name in files else 0
        return FileStat(size, modified)

    def leftovers(self) -> dict[str, FileStat]:
        """Return the hidden folders of saves and removals in here, by path; not one in which the checkpoint itself still lies."""
        hidden = []
        with contextlib.suppress(PermissionError):
            hidden = folders.asides(self.location)
        unused = [path for path, name in hidden if not self.entry(name).fetch().startswith(f"{path}/")]
        return {path: LocalStorage(path).stored() for path in unused}

    def fetch(self, wanted: Callable[[str], bool] | None = None) -> str:
        """Return the folder itself: the location, or where a publish that was killed between two renames left the checkpoint."""
        for aside, name in () if os.path.isdir(self.location) else folders.asides(os.path.dirname(self.location)):
            if name == self.name and folders.is_folder(former := os.path.join(aside, folders.FORMER)):
                new = os.path.join(aside, self.name)
                return new if folders.is_folder(new) else former
        return self.location

    # -- publishing ----------------------------------------------------------------------------------------------------

    def stage(self, save: str = "") -> str:
        """Make the hidden, empty folder; OSError if no checkpoint can take the location, Busy if one is saved."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(self.location).st_mode):  # which raises for a name that is too long
                raise NotADirectoryError(f"A checkpoint cannot take the place of a file: {self.location!r} is one.")
            self._refuse_what_stays()
        folders.make_folder(os.path.dirname(self.location))
        self.discard()
        try:
            self._lock.enter_context(self.locked())
            self._aside = self._make_aside()
            self._staged = os.path.join(self._aside, self.name)
            os.mkdir(self._staged)
        except BaseException:
            self.discard()
            raise
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

    def _make_aside(self) -> str:
        """Make a hidden folder that says whose it is."""
        while True:
            path = os.path.join(os.path.dirname(self.location), STAGING_PREFIX + os.urandom(8).hex())
            os.mkdir(path)
            with contextlib.suppress(FileNotFoundError):  # another process took the empty folder for a left-over
                Path(path, folders.PLACE).write_bytes(os.fsencode(self.name))
                return path

    def publish(self) -> None:
        """Let what was staged, whose files are on the disk, take the location. All in it but the parts of a checkpoint stays."""
        sync_tree(self._staged)
        former = os.path.join(self._aside, folders.FORMER)
        if not (replaces := os.path.lexists(self.location)):
            os.rename(self._staged, self.location)
        else:
            # It will have what is the user's own, which is found again by the name in the file.
            sync_file(os.path.join(self._aside, folders.PLACE))
            sync_folder(self._aside)
            with contextlib.suppress(OSError):
                shutil.copymode(self.location, self._staged)
            os.rename(self._staged, former)  # the name of the former one once the two are exchanged
            if not exchange(former, self.location):
                os.rename(former, self._staged)
                os.rename(self.location, former)
                os.rename(self._staged, self.location)
        self._staged = ""
        sync_folder(os.path.dirname(self.location))
        if replaces:
            self._complete_publish(self._aside)

    def discard(self) -> None:
        """Remove what was staged or, once that is published, what it replaced; then the lock is free."""
        if self._staged:
            with warned(f"{self._staged} could not be removed"):
                os.rename(self._staged, os.path.join(self._aside, folders.GONE))
                self._complete_publish(self._aside)  # the former one may have left its location
        if self._aside:
            folders.remove_aside(self._aside)
        self._staged = self._aside = ""
        self._lock.close()

    def _complete(self) -> None:
        """Bring publishes to their end from whichever step they have come to, and remove what is worth nothing. Needs the lock."""
        for aside, name in folders.asides(os.path.dirname(self.location)):
            if name == self.name:
                self._complete_publish(aside)
                folders.remove_aside(aside)
        folders.remove_empty_asides(os.path.dirname(self.location))

    def _complete_publish(self, aside: str) -> None:
        """Complete the publish of a hidden folder: what is left in it then is worth nothing. Needs the lock."""
        new, former = os.path.join(aside, self.name), os.path.join(aside, folders.FORMER)
        with warned(f"What was at {self.location} before is still in {aside}"):  # the next save continues with it
            if folders.is_folder(former) and not os.path.lexists(self.location):
                os.rename(new if folders.is_folder(new) else former, self.location)
                sync_folder(os.path.dirname(self.location))
            if folders.is_folder(former):
                if not folders.is_folder(self.location):
                    raise NotADirectoryError(f"{self.location} is a link or a file")
                folders.carry_over(former, self.location, folders.parts_of(former))
            for worthless in filter(folders.is_folder, (former, new)):
                os.rename(worthless, os.path.join(aside, folders.GONE))

    def remove(self) -> None:
        """Remove the checkpoint; it is out of sight before its first file goes."""
        with self.locked():
            aside = self._make_aside()
            try:
                os.rename(self.location, os.path.join(aside, folders.GONE))
            finally:
                folders.remove_aside(aside)

    def sweep(self, older_than_s: float = ABANDONED_S) -> None:
        """Remove what killed runs left among the checkpoints here, however old: no run has its lock."""
        names = {name for _, name in folders.asides(self.location)}
        entries = [entry.name for entry in folders.scan(self.location)]
        names |= {entry.removeprefix(LOCK_PREFIX) for entry in entries if entry.startswith(LOCK_PREFIX)}
        for name in sorted(filter(folders.is_name, names)):
            with warned(f"What a save of {name!r} left in {self.location} could not be removed"):
                with contextlib.suppress(Busy), self.entry(name).locked(waits=False):
                    pass  # it has removed what it found

    # -- one writer at a time ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, waits: bool = True) -> Iterator[None]:
        """Hold the lock, which the system drops with the process; complete or remove what a killed one left."""
        key, owner = os.fsencode(self.name), os.getpid()
        name = self.name if len(key) <= _LONGEST else hashlib.sha256(key).hexdigest()
        path = os.path.join(os.path.dirname(self.location), LOCK_PREFIX + name)
        for tenths in itertools.count():
            descriptor = folders.open_lock(path)
            holds = folders.lock(descriptor, path)
            if holds or (holds is None and waits):
                break
            os.close(descriptor)
            if tenths == 20:
                logger.warning("Another process is saving to %s; waiting for it.", self.location)
            if not waits or tenths >= 10 * PATIENCE_S:
                raise Busy(
                    f"Another process has been saving to {self.location!r} for {tenths / 10:.0f} s: it holds {path!r}. Is a "
                    "former one still running? Machines of one run that share a disk omit save_on_each_node=True."
                )
            time.sleep(0.1)
        try:
            self._complete()
            del self  # which has this generator: a storage that is dropped drops its lock at once
            yield
        finally:
            with contextlib.suppress(OSError), os.fdopen(descriptor):
                # A fork has the descriptor, too, and must not give up what is its parent's. A file with content is the user's own.
                if os.getpid() == owner and os.fstat(descriptor).st_size == 0:
                    os.unlink(path)


# -- finding the storage -----------------------------------------------------------------------------------------------


def storage_of(path: str | os.PathLike[str]) -> CheckpointStorage:
    """Return the storage of a path, of a ``file://`` URL, or of another URL, which an extension serves.

    ValueError for a URL with one slash or without an extension that serves it.
    """
    text = os.path.expanduser(os.fspath(path)).removeprefix("file://").removeprefix("local://")
    if "://" in text:
        for spec in (*third_parties(), *specs()):
            if spec.storage:
                storage: CheckpointStorage = imported(spec.storage)(text.rstrip("/"))
                return storage
        raise ValueError(f"{text!r}: no extension of accelerate stores checkpoints at URLs. Pass a local folder.")
    protocol, separator, rest = text.partition(":/")
    if separator and len(protocol) > 1 and protocol.isalnum() and not os.path.isdir(f"{protocol}:"):
        raise ValueError(
            f"{text!r} is neither a folder nor a URL: a URL has two slashes. Pass '{protocol}://{rest}', or './{text}' for a folder."
        )
    return LocalStorage(text)
