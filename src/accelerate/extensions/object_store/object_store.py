"""Checkpoints in an object store, by fsspec: written next to each other, published by writing one object.

An object store has no rename, but the writing of one object is atomic. So the files of each save go below a separate name,
the generation, and the manifest next to it says which generation counts::

    s3://bucket/run/checkpoint_3/accelerate_manifest.json     {"generation": "g-20260102T030405Z-0123456789abcdef", ...}
    s3://bucket/run/checkpoint_3/g-20260102T030405Z-0123456789abcdef/model.safetensors
    s3://bucket/run/checkpoint_3/g-20260102T030405Z-0123456789abcdef/...

Replacing a checkpoint writes another generation, then the manifest, then removes the former generation. A reader finds the
old one or the new one. A save that is killed leaves a generation that no manifest names; the next save to its place removes it, and
another save of the run when it is a day old.

Each rank streams its files into the generation while it makes them; what hooks and other code write by path comes from a local
folder. A load downloads into a local folder the files that the ranks of its node read.

A manifest without a generation is read, too: its files are next to it, as when a local checkpoint was copied to the store. So
are files without a manifest, as another library saves them.

Requests that fail for a moment are repeated by the packages behind fsspec.
"""

import contextlib
import io
import json
import os
import posixpath
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from accelerate.checkpoint import manifest
from accelerate.checkpoint.folders import warned
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, UnreadableManifest, damaged, files_below
from accelerate.checkpoint.storage import ABANDONED_S, CheckpointStorage, FileStat, refuse_unfinished
from accelerate.runtime.durable import BLOCK, Checksum, HashedFile, each, is_inside

# A reader begins again when the checkpoint is replaced under its hands; that a third replaces the second meanwhile is no accident.
_LOOKS = 3
# Enough to keep a network busy.
_AT_ONCE = 4
# Files of this size are sent in parts of 50 MB, several at a time, all of them in memory: two such files at once are enough.
_LARGE, _LARGE_AT_ONCE = 100 << 20, 2

# The time of an object, which each file system gives in its own way.
_TIMES = ("LastModified", "mtime", "last_modified", "created")

_GENERATION = re.compile(r"g-[0-9]{8}T[0-9]{6}Z-[0-9a-f]{16}")
_LATEST = "g-~"  # is behind the names of all generations

# Protocols of fsspec that write no files.
_READ_ONLY = ("http://", "https://", "data://", "github://")


class ObjectStore(CheckpointStorage):
    """A checkpoint in an object store, or wherever else fsspec reaches.

    A save on one node is the same as for a local folder: `stage`, write, `publish`. On several nodes, one rank of each
    stages for the ranks of its node (`shared` is False), all by the same name. All ranks `create` their files, and those that
    staged `sync` what else was written into their folders. When all have done so, one rank calls `publish`.

    The credentials and the address of the store come from the environment or from fsspec's configuration.
    ImportError names a package that a URL needs; ValueError says that no checkpoint can be there.
    """

    shared = False

    def __init__(self, location: str) -> None:
        if location.endswith(":"):  # a root, whose slashes were taken for those at the end of a path
            location += "//"
        if location.startswith(_READ_ONLY):
            raise ValueError(
                f"{location!r}: {location.partition('://')[0]}:// URLs cannot be written. Save checkpoints in a local folder, or at a URL "
                "of an object store such as s3://, gs:// or az://."
            )
        if "::" in location:
            raise ValueError(f"A checkpoint cannot lie behind a chained URL: {location!r}. Give its last part alone.")
        super().__init__(location)
        self._objects = _Objects(location)
        self._scratch: TemporaryDirectory[str] | None = None
        self._staged = ""  # the folder in it
        self._listing: Manifest | None = None  # of what `fetch` has fetched

    # -- looking ---------------------------------------------------------------------------------------------------

    def _verified(self) -> tuple[Manifest | None, list[str]]:
        published = self._published()
        if published.manifest is None:
            return None, []
        return published.manifest, _differences(published.manifest, self._objects.below(published.generation))

    def _published(self) -> "_Published":
        """Return which files count; FileNotFoundError for none, DamagedCheckpoint for what must not be loaded."""
        entries = self._objects.entries()
        if not entries:
            raise FileNotFoundError(f"There is no checkpoint at {self.location!r}: nothing is there.")
        published = self._read(entries)
        if not published.generation:
            refuse_unfinished([name for name, stored in entries.items() if stored is not None])
            if all(_GENERATION.fullmatch(name) for name in entries):
                raise DamagedCheckpoint("its saving did not come to its end")
        return published

    def _read(self, entries: Mapping[str, FileStat | None]) -> "_Published":
        """Return what the manifest among the entries names. Nothing in it is trusted."""
        if entries.get(NAME) is None:
            return _Published()
        url = self._objects.url(NAME)
        with self._objects.at(NAME, "read") as (system, path):
            text = system.cat_file(path)
        listing, generation = Manifest.from_json(text, url), json.loads(text).get("generation", "")
        if generation != "" and not _GENERATION.fullmatch(str(generation)):
            raise UnreadableManifest(f"{url} names the generation {repr(generation)[:80]}, which is none")
        return _Published(listing, generation, text)

    def entries(self) -> list["ObjectStore"]:
        """Return the folders that lie here, by name; hidden ones are omitted. Those of the checkpoint are among them."""
        folders = {os.path.basename(path): path for path, stored in self._visible().items() if stored is None}
        shown = [name for name in sorted(folders) if not name.startswith(".") and not _GENERATION.fullmatch(name)]
        return [self.child(folders[name]) for name in shown]

    def files(self) -> dict[str, FileStat]:
        """Return the files that lie directly here, by name. Those of the checkpoint are among them."""
        return {os.path.basename(path): stored for path, stored in self._visible().items() if stored is not None}

    def _visible(self) -> dict[str, FileStat | None]:
        """Return what lies directly here, and then what lies directly in the generation that counts, by path."""
        found: dict[str, FileStat | None] = {}
        with contextlib.suppress(DamagedCheckpoint, FileNotFoundError):
            found = self._objects.entries()
            if generation := self._read(found).generation:
                inside = self._objects.entries(generation)
                return found | {f"{generation}/{name}": stored for name, stored in inside.items()}
        return found

    # -- reading ---------------------------------------------------------------------------------------------------

    def fetch(self, wanted: Callable[[str], bool] | None = None) -> str:
        """Return a temporary folder of this process with the wanted files, by their path in the manifest, and that.

        What was fetched before is not fetched again. `release`, or the end of the process, removes the folder. Sizes
        are compared here, checksums by who loads. Not a collective; one rank of a node may fetch for all. Raises
        FileNotFoundError for nothing, DamagedCheckpoint for what is not whole, OSError if store or disk refuses.
        """
        former = None
        try:
            for _ in range(_LOOKS):
                if (published := self._published()) == former:
                    break
                former = published
                sizes = self._foreign() if published.manifest is None else _sizes(published.manifest)
                key = (os.getpid(), self.location, published.text, frozenset(sizes.items()))
                if key not in _copies:
                    _copies[key] = _folder()
                folder = os.path.join(_copies[key].name, "checkpoint")
                os.makedirs(folder, exist_ok=True)
                self.fetched = folder, published.generation
                found = self._download({name: size for name, size in sizes.items() if not wanted or wanted(name)})
                if not found:
                    self._listing = published.manifest
                    if self._listing is not None:
                        self._listing.write(folder)
                    return folder
        except DamagedCheckpoint as error:
            found = [str(error)]
        raise damaged(self.location, found)

    def outline(self) -> tuple[str, Manifest | None]:
        """Return what `fetch` returns, with the manifest and files that are empty until `bring` downloads them.

        What another library saved is fetched: nothing says what its bytes should be.
        """
        folder = self.fetch(lambda name: False)
        if self._listing is None:
            return self.fetch(), None
        for name in self._listing.files:
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "ab"):
                pass
        return folder, replace(self._listing, mark=manifest.mark(folder))

    def bring(self, sizes: Mapping[str, int]) -> None:
        """Download files into the folder that was fetched, which ranks of a node may share."""
        if found := self._download(sizes):
            raise damaged(self.location, found)

    def _foreign(self) -> dict[str, int]:
        """Return the sizes of what another library saved here, by path."""
        sizes = {name: size for name, size in self._objects.below().items() if not _GENERATION.match(name)}
        outside = [name for name in sizes if not is_inside(name)]
        if outside:
            raise DamagedCheckpoint(f"the name of the object {outside[0]!r} leads out of the folder")
        return sizes

    def _download(self, sizes: Mapping[str, int]) -> list[str]:
        """Do what `bring` does; return a line for each object that is missing, or has another size."""
        return [line for line in each(self._get, sizes.items(), _AT_ONCE) if line]

    def _get(self, file: tuple[str, int]) -> str | None:
        """Download a file unless it is there already, one rank of the node at a time."""
        if self.fetched is None:
            raise RuntimeError(f"Nothing of {self.location!r} has been fetched here: call fetch first.")
        (name, size), (folder, generation) = file, self.fetched
        path, partial, lock = (os.path.join(root, name) for root in (folder, f"{folder}_partial", f"{folder}_locks"))
        for place in (path, partial, lock):
            os.makedirs(os.path.dirname(place), exist_ok=True)
        with _waiting_lock(lock):
            if os.path.exists(path) and os.path.getsize(path) == size:
                return None
            try:
                with self._objects.at(f"{generation}/{name}".lstrip("/"), "downloaded") as (system, base):
                    system.get_file(base, partial)
            except FileNotFoundError:
                return manifest.difference(name, size, None)
            if (found := os.path.getsize(partial)) != size:
                return manifest.difference(name, size, found)
            os.replace(partial, path)
        return None

    def release(self) -> None:
        """Remove what `fetch` made for this process."""
        for key in [key for key in _copies if key[:2] == (os.getpid(), self.location)]:
            _copies.pop(key).cleanup()

    # -- writing ---------------------------------------------------------------------------------------------------

    def stage(self, save: str = "") -> str:
        """Make an empty folder in ``$TMPDIR``, for files that are not written by `create`. One process a node.

        Its last part is the name of the generation. `discard`, or the end of this object, removes it.
        """
        self.discard()
        self._scratch = _folder()
        self._staged = os.path.join(self._scratch.name, f"g-{save or manifest.save_name()}")
        os.mkdir(self._staged)
        return self._staged

    def create(self, folder: str, name: str) -> HashedFile:
        """Stream a file into the store, in parts where it is large: no local disk has it. Any rank."""
        return HashedFile(_Upload(self._objects, f"{os.path.basename(folder)}/{name}"))

    def sync(self, folder: str, names: Iterable[str]) -> None:
        """Move files of a staged folder, which hooks and other code have written, to the store; those of `create` are there."""
        paths = {name: os.path.join(folder, name) for name in names}
        sizes = {name: os.path.getsize(path) for name, path in paths.items() if os.path.exists(path)}

        def put(name: str) -> None:
            with self._objects.at(f"{os.path.basename(folder)}/{name}", "uploaded") as (system, path):
                system.put_file(paths[name], path)
            os.unlink(paths[name])

        each(put, [name for name in sizes if sizes[name] > _LARGE], _LARGE_AT_ONCE)
        each(put, [name for name in sizes if sizes[name] <= _LARGE], _AT_ONCE)

    def parts(self, folder: str, ranks: Iterable[int], written: int) -> dict[int, bytes]:
        """Return the parts of the manifest in the store, by rank, read together."""
        generation = os.path.basename(folder)
        names = self._objects.below(f"{generation}/{manifest.PARTS_FOLDER}")
        stored = [rank for rank in ranks if os.path.basename(manifest.part_file(rank)) in names]
        with self._objects.at(generation, "read") as (system, base):
            paths = [f"{base}/{manifest.part_file(rank)}" for rank in stored]
            return dict(zip(stored, system.cat_ranges(paths, None, None, on_error="raise"), strict=True))

    def publish(self) -> None:
        """Upload the rest, and let it be the checkpoint. The process with the manifest; all others have uploaded.

        If it raises OSError, or DamagedCheckpoint for objects that are not complete, what was here before stays.
        """
        if not self._staged:
            raise RuntimeError(f"Nothing is staged for {self.location!r}: call stage first.")
        listing, generation = Manifest.read(self._staged), os.path.basename(self._staged)
        self.sync(self._staged, files_below(self._staged) - {NAME})
        differences = _differences(listing, self._objects.below(generation))
        if differences:
            raise DamagedCheckpoint(
                f"The checkpoint was not published at {self.location}: {'; '.join(differences[:10])}. Each node must call sync() "
                "first, and only one run at a time may save there."
            )
        self._objects.write(NAME, listing.to_json(generation=generation).encode())

    def discard(self) -> None:
        """Remove the staged folder, and the generations that do not count. The process that publishes calls this."""
        if self._scratch is None:
            return
        self._scratch.cleanup()
        self._scratch, self._staged = None, ""
        with warned(f"What does not count any more at {self.location} could not be removed"):
            self._clear()

    # -- removing --------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Remove the checkpoint with all that lies here; no reader takes a part of it for a checkpoint meanwhile."""
        entries = self._objects.entries()
        if entries:
            self._objects.write(manifest.INCOMPLETE_MARKER, b"")
        for name in (NAME, *(entries.keys() - {manifest.INCOMPLETE_MARKER})):
            self._objects.remove(name)
        self._objects.remove()
        self.release()

    def leftovers(self) -> dict[str, FileStat]:
        """Return what saves left in here and in its folders, or are uploading right now, by URL."""
        return {
            storage._objects.url(name): stored or storage.child(name).stored()
            for storage in (self, *self.entries())
            for name, stored in storage._superseded().items()
        }

    def sweep(self, older_than_s: float = ABANDONED_S) -> None:
        """Remove from here and its folders what has been replaced, and what saves left that began so long ago and did not publish."""
        # A store has no locks: another run may still be writing a younger one.
        last = _generation_at(datetime.now(timezone.utc) - timedelta(seconds=older_than_s))
        for storage in (self, *self.entries()):
            storage._clear(last)

    def _superseded(self, last: str = _LATEST) -> dict[str, FileStat | None]:
        """Return the entries that do not count: of what has been replaced, and of saves begun until `last` that did not publish."""
        entries = self._objects.entries()
        # What is no part of a checkpoint is the user's own.
        parts = [name for name in sorted(entries) if manifest.is_checkpoint_file(name) or _GENERATION.fullmatch(name)]
        if NAME in entries and len(parts) <= 1:
            return {}  # the usual case, without another request
        try:
            current = self._read(entries).generation
        except (DamagedCheckpoint, FileNotFoundError):
            return {}  # a person may still want to look at the parts
        if not current:  # the parts next to the generations count
            parts = [name for name in parts if _GENERATION.fullmatch(name)]
        # Names of generations sort by time.
        younger = {
            name for name in parts if _GENERATION.fullmatch(name) and name > current and name[: len(last)] > last
        }
        return {name: entries[name] for name in parts if name != current and name not in younger}

    def _clear(self, last: str = _LATEST) -> None:
        """Remove what `_superseded` returns."""
        superseded = self._superseded(last)
        for name in superseded:
            self._objects.remove(name)
        if superseded and not self._objects.entries():
            self._objects.remove()  # a file system with real folders keeps the empty one


def _generation_at(time: datetime) -> str:
    """Return how the name of a generation begins that is made at a time."""
    return f"g-{time:%Y%m%dT%H%M%SZ}"


class _Published(NamedTuple):
    """The files that count; the manifest is None if another library saved them.

    Attributes:
        generation: the folder that holds them; empty if they are next to the manifest.
        text: the manifest as it was read: another one means another checkpoint.
    """

    manifest: Manifest | None = None
    generation: str = ""
    text: bytes = b""


# -- the objects below a URL -------------------------------------------------------------------------------------------


class _Objects:
    """The objects below one URL, by their paths relative to it; errors name the object."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._system()

    def _system(self) -> tuple[Any, str]:
        """Return the file system and the path in it; fsspec keeps the instances, and makes others for a fork."""
        try:
            from fsspec.core import url_to_fs

            system_and_path: tuple[Any, str] = url_to_fs(self.location)
            return system_and_path
        except ImportError as error:
            command = 'pip install "accelerate[object-stores]", and the package of the store, such as s3fs or gcsfs'
            raise ImportError(f"{self.location!r} needs another package: {error}. Run {command}.") from error

    def url(self, name: str) -> str:
        """Return the URL of an object."""
        return posixpath.join(self.location, name) if name else self.location

    @contextlib.contextmanager
    def at(self, name: str, done: str) -> Iterator[tuple[Any, str]]:
        """Give the file system, without the listings that it remembers, and the path of an object or a folder in it."""
        system, root = self._system()
        system.invalidate_cache()
        try:
            yield system, f"{root.rstrip('/')}/{name}" if name else root
        except Exception as error:
            raise self.named(error, name, done) from error

    def named(self, error: Exception, name: str, done: str) -> OSError:
        """Return an error that names the object, and what could not be done with it, for an error of the store."""
        failure = f"{self.url(name)} could not be {done}"
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(f"{failure}: {error}")
        if isinstance(error, PermissionError):
            return PermissionError(f"{failure}: {error}. Check the credentials and their rights.")
        return OSError(f"{failure}: {type(error).__name__}: {error}")  # each package raises different errors

    def entries(self, folder: str = "") -> dict[str, FileStat | None]:
        """Return what lies directly in a folder: names of objects, and names of folders with None."""
        found: dict[str, FileStat | None] = {}
        for name, info in self._listed(folder, "ls"):
            if name:  # some consoles make an empty object without a name to show a folder
                times = (info[key].timestamp() for key in _TIMES if isinstance(info.get(key), datetime))
                stored = FileStat(int(info["size"] or 0), next(times, None))
                found[name] = None if info["type"] == "directory" else stored
        return found

    def below(self, folder: str = "") -> dict[str, int]:
        """Return the sizes of all objects below a folder, by their path relative to it; that of an object itself is empty."""
        return {
            name: int(info["size"] or 0)
            for name, info in self._listed(folder, "find")
            if info["type"] == "file" and not info["name"].endswith("/")
        }

    def _listed(self, folder: str, method: str) -> list[tuple[str, dict[str, Any]]]:
        """Return what a method of the file system says of what is in a folder, by the path relative to it."""
        with contextlib.suppress(FileNotFoundError), self.at(folder, "listed") as (system, base):
            infos = getattr(system, method)(base, detail=True)
            infos = infos.values() if isinstance(infos, dict) else infos
            return [(system._strip_protocol(info["name"])[len(base) :].strip("/"), info) for info in infos]
        return []

    def write(self, name: str, data: bytes) -> None:
        """Write a small object at once: it is there in full, or as it was before."""
        with self.at(name, "written") as (system, path):
            system.pipe_file(path, data)

    def remove(self, name: str = "") -> None:
        """Remove an object, or all objects below a folder and the folder where it is one; but never a bucket."""
        with contextlib.suppress(FileNotFoundError), self.at(name, "removed") as (system, path):
            # In as few requests as the store can; but fsspec takes such names for patterns.
            if "/" in path.strip("/") and not any(sign in path for sign in "*?["):
                system.rm(path, recursive=True)

        def remove(file: str) -> None:
            with contextlib.suppress(FileNotFoundError), self.at(file, "removed") as (system, path):
                system.rm_file(path)

        # What is left, because a store that removes many objects says nothing of those that it refuses to remove.
        each(remove, [f"{name}/{inner}".strip("/") for inner in self.below(name)], _AT_ONCE)


class _Upload(io.RawIOBase):
    """The raw file of an object that is written once, from its beginning to its end; see `durable.DiskFile`."""

    def __init__(self, objects: _Objects, name: str) -> None:
        super().__init__()
        self.checksum = Checksum()
        self.problem: Exception | None = None
        self._objects, self._name = objects, name
        with objects.at(name, "uploaded") as (system, path):
            try:
                self._stream = system.open(path, "wb")
            except FileNotFoundError:  # of a file system with real folders
                system.makedirs(posixpath.dirname(path), exist_ok=True)
                self._stream = system.open(path, "wb")

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.checksum.size

    def write(self, data: Any) -> int:
        try:
            for start in range(0, len(data), BLOCK):  # of which the stream makes parts
                self.checksum.update(data[start : start + BLOCK])
                self._stream.write(data[start : start + BLOCK])
        except Exception as error:
            self.problem = error
            raise
        return len(data)

    def named(self, error: Exception) -> Exception:
        return self._objects.named(error, self._name, "uploaded")

    def finish(self) -> None:
        self._stream.close()

    def discard(self) -> None:
        # Parts that were sent are removed, as far as the store can.
        for give_up in (self._stream.discard, self._stream.close):
            with contextlib.suppress(Exception):
                give_up()


@contextlib.contextmanager
def _waiting_lock(path: str) -> Iterator[None]:
    """Hold the lock of a file once the others have released it; without effect where the file system has no locks."""
    with open(path, "ab") as file:
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- local folders -----------------------------------------------------------------------------------------------------

# What this process has fetched. A fork inherits the entries, but makes separate folders.
_copies: dict[tuple[Hashable, ...], TemporaryDirectory[str]] = {}


def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="accelerate_checkpoint_", ignore_cleanup_errors=True)


def _sizes(listing: Manifest) -> dict[str, int]:
    return {name: entry.size for name, entry in listing.files.items()}


def _differences(listing: Manifest, there: Mapping[str, int]) -> list[str]:
    wrong = [(name, size) for name, size in sorted(_sizes(listing).items()) if there.get(name) != size]
    return [manifest.difference(name, size, there.get(name)) for name, size in wrong]
