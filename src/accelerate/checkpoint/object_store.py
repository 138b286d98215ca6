"""Checkpoints in an object store, by fsspec: uploaded beside each other, published by writing one object.

An object store has no rename, but the writing of one object is atomic. So the files of each save go below a name of their own,
the generation, and the manifest beside it says which generation counts::

    s3://bucket/run/checkpoint_3/accelerate_manifest.json     {"generation": "g-20260102T030405Z-0123456789abcdef", ...}
    s3://bucket/run/checkpoint_3/g-20260102T030405Z-0123456789abcdef/model.safetensors
    s3://bucket/run/checkpoint_3/g-20260102T030405Z-0123456789abcdef/...

Replacing a checkpoint uploads another generation, writes the manifest, then removes the former generation. Whoever reads finds
the old one or the new one. A save that is killed leaves a generation that no manifest names; the next save removes it.

A manifest without a generation is read, too: its files lie beside it, as when a local checkpoint was copied to the store.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from threading import Lock

from accelerate.checkpoint import names, temporary
from accelerate.checkpoint.bucket import Bucket, concurrently
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, damaged, is_inside, laid_out
from accelerate.checkpoint.storage import CheckpointStorage, State, Stored

logger = logging.getLogger(__name__)

# A reader begins anew when the checkpoint is replaced under its hands; that a third replaces the second meanwhile is no accident.
_LOOKS = 3
_LARGEST_MANIFEST = 512 << 20

_GENERATION = re.compile(r"g-[0-9]{8}T[0-9]{6}Z-[0-9a-f]{16}")


@dataclass(frozen=True)
class _Published:
    """A checkpoint that can be fetched.

    Attributes:
        key: changes when another checkpoint takes the place.
        base: the folder of its files below the location, with a slash at its end, or nothing.
        sizes: its files by path, with their sizes.
        manifest: its manifest; None if another library saved it.
    """

    key: str
    base: str
    sizes: Mapping[str, int]
    manifest: Manifest | None

    @property
    def generation(self) -> str | None:
        """The name of the folder that holds the files, if it is one of ours."""
        return self.base.rstrip("/") or None


class ObjectStore(CheckpointStorage):
    """A checkpoint in an object store, or wherever else fsspec reaches.

    A save on one node is the same as for a local place: `stage`, write, `publish`. On several nodes, each stages for its own
    ranks (`shared` is False): when all have, each tells the others its `generation`, all of them `join` that of the rank that
    is going to publish, and `upload` when their ranks have written. When all have uploaded, that one rank calls `publish`.
    The same object takes part from beginning to end.

    The credentials and the address of the store come from the environment or from fsspec's configuration.

    Args:
        location: a URL, such as ``s3://bucket/run``.

    Raises:
        ImportError: fsspec, or the package that it needs for this kind of URL, is not installed.
        ValueError: the URL is of no kind that fsspec knows, or is chained, or has ``.`` or ``..`` in it.
    """

    def __init__(self, location: str) -> None:
        if location.endswith(
            ":"
        ):  # the root of a file system, whose slashes were taken for those at the end of a path
            location += "//"
        if "::" in location:
            raise ValueError(f"A checkpoint cannot lie behind a chained URL: {location!r}. Give its last part alone.")
        if any(part in (".", "..") for part in location.split("/")):
            raise ValueError(f"The URL of a checkpoint has no '.' and no '..' in it, unlike {location!r}.")
        super().__init__(location)
        self._store = Bucket(location)
        self._generation: str | None = None
        self._staged: str | None = None
        self._discarded: Callable[[], object] = lambda: None

    @property
    def shared(self) -> bool:
        """Other nodes do not see what one process stages: it is a local folder."""
        return False

    def child(self, name: str) -> "ObjectStore":
        """Return the place of that name inside this one."""
        return ObjectStore(self._store.url(name))

    def parent(self) -> "ObjectStore":
        """Return the place that this one lies in; the root is its own."""
        protocol, _, path = self.location.partition("://")
        return ObjectStore(f"{protocol}://{path.rpartition('/')[0]}")

    # -- looking ---------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Say what lies here; no file but the manifest is read. Any rank, alone.

        Raises:
            OSError: the store refuses, or does not answer.
        """
        found: list[str] = []
        manifest = None
        for _ in range(_LOOKS):
            try:
                published = self._published(listed=False)
            except FileNotFoundError:
                return State("absent", "there is nothing")
            except NotADirectoryError:
                return State("absent", "it is an object")
            except DamagedCheckpoint as error:
                return State("incomplete", str(error))
            manifest = published.manifest
            if manifest is None:
                return State("foreign", "it has no manifest: another library or an older version saved it")
            found = _differences(published.sizes, self._sizes(published.base))
            if not found:
                return State("complete", "", manifest)
            if self._key() == published.key:
                break
        return State("incomplete", "; ".join(found), manifest)

    def _published(self, listed: bool = True) -> _Published:
        """Read the manifest, or list what another library saved.

        Args:
            listed: whether those files are listed; there may be many.

        Raises:
            FileNotFoundError: there is nothing.
            DamagedCheckpoint: nobody should load what is here.
        """
        entries = self._store.entries()
        if entries.get(NAME) is not None:
            told = self._told(entries)
            if told is not None:
                if told.generation is None:
                    _refuse_marked(entries)
                return told
            entries = self._store.entries()  # it has been removed just now
        if not entries:
            raise FileNotFoundError(f"There is no checkpoint at {self.location!r}: nothing lies there.")
        _refuse_marked(entries)
        if any(names.is_generators_file(entry) for entry in entries):
            raise DamagedCheckpoint(f"its manifest {NAME} is missing")
        if all(_GENERATION.fullmatch(entry) for entry in entries):
            raise DamagedCheckpoint("its saving did not come to its end")
        found = self._sizes() if listed else {}
        sizes = {name: size for name, size in found.items() if not _GENERATION.fullmatch(name.split("/")[0])}
        return _Published("listed-" + _digest(json.dumps(sorted(sizes.items()))), "", sizes, None)

    def _sizes(self, base: str = "") -> dict[str, int]:
        return {name: stored.size for name, stored in self._store.below(base).items()}

    def _told(self, entries: Mapping[str, Stored | None]) -> _Published | None:
        marker = entries[NAME]
        if marker is not None and marker.size > _LARGEST_MANIFEST:
            raise DamagedCheckpoint(f"{self._store.url(NAME)} has {marker.size} bytes, which no manifest has")
        text = self._store.read(NAME)
        if text is None:
            return None
        manifest = Manifest.from_json(text, self._store.url(NAME))
        told = json.loads(text)
        generation = told.get("generation")
        if "generation" in told and (not isinstance(generation, str) or not _GENERATION.fullmatch(generation)):
            shown = repr(generation)[:80]
            raise DamagedCheckpoint(f"{self._store.url(NAME)} names the generation {shown}, which is none")
        sizes = {name: entry.size for name, entry in manifest.files.items()}
        return _Published(_digest(text), f"{generation}/" if generation else "", sizes, manifest)

    def _key(self) -> str | None:
        try:
            return self._published().key
        except (FileNotFoundError, DamagedCheckpoint):
            return None

    def entries(self) -> list[CheckpointStorage]:
        """Return the folders that lie here, by name; hidden ones are left out. Those of the checkpoint are among them."""
        found: dict[str, CheckpointStorage] = {}
        for base, entries in self._layers():
            found |= {name: self.child(base + name) for name, stored in entries.items() if stored is None}
        return [found[name] for name in sorted(found) if not name.startswith(".") and not _GENERATION.fullmatch(name)]

    def files(self) -> dict[str, Stored]:
        """Return the files that lie directly here, by name. Those of the checkpoint are among them."""
        found: dict[str, Stored] = {}
        for _, entries in self._layers():
            found |= {name: stored for name, stored in entries.items() if stored is not None}
        return found

    def _layers(self) -> list[tuple[str, dict[str, Stored | None]]]:
        """What lies here, and what lies in the generation that counts: with the path below the location in front of it."""
        try:
            layers = [("", self._store.entries())]
            if layers[0][1].get(NAME) is not None and (told := self._told(layers[0][1])) is not None and told.base:
                layers.append((told.base, self._store.entries(told.base)))
        except NotADirectoryError:
            return []
        except DamagedCheckpoint:
            pass
        return layers

    def leftovers(self) -> dict[str, Stored]:
        """Return what saves left in here and in its folders, or are uploading right now, by URL."""
        found = {}
        for place in self._places():
            objects, folders = place._superseded()
            for name in folders:
                there = place._store.below(name).values()
                times = [stored.modified for stored in there if stored.modified is not None]
                found[place._store.url(name)] = Stored(sum(s.size for s in there), max(times, default=None))
            found |= {place._store.url(name): stored for name, stored in objects.items()}
        return dict(sorted(found.items()))

    def _places(self) -> list["ObjectStore"]:
        return [self, *(entry for entry in self.entries() if isinstance(entry, ObjectStore))]

    def size(self) -> int:
        """Return the bytes of all objects here, those of killed saves included."""
        return sum(self._sizes().values())

    # -- reading ---------------------------------------------------------------------------------------------------

    def fetch(self, wanted: Callable[[str], bool] | None = None) -> str:
        """Return a temporary folder of this process with the checkpoint's files and its manifest.

        What was fetched before is not fetched again. The folder is removed by `release`, or when the process exits. Sizes are
        compared here; whoever loads a file compares its checksum. Any rank, alone; one rank of a node may fetch for all.

        Args:
            wanted: which files, by their path in the manifest; all by default.

        Raises:
            FileNotFoundError: there is no checkpoint.
            DamagedCheckpoint: a file is missing or has another size than the manifest says, or the save did not come to its end.
            OSError: the store or the local disk refuses.
        """
        for look in range(_LOOKS):
            try:
                published = self._published()
            except DamagedCheckpoint as error:
                raise damaged(self.location, [str(error)]) from None
            copy = _copy_of(self.location, published)
            try:
                with copy.lock:
                    return self._download(published, copy.folder, wanted)
            except DamagedCheckpoint as error:
                if look == _LOOKS - 1 or self._key() in (published.key, None):
                    raise damaged(self.location, [str(error)]) from None
        raise AssertionError("the last look raises")

    def _download(self, published: _Published, folder: str, wanted: Callable[[str], bool] | None) -> str:
        chosen = {name: size for name, size in published.sizes.items() if wanted is None or wanted(name)}
        for name in chosen:
            if not is_inside(name):
                raise DamagedCheckpoint(f"the name of the object {name!r} leads out of the folder")

        def get(name: str) -> None:
            size, path = chosen[name], os.path.join(folder, *name.split("/"))
            if os.path.isfile(path) and os.path.getsize(path) == size:
                return
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._store.get(published.base + name, path, size)

        concurrently(get, chosen)
        if published.manifest is not None:
            published.manifest.write(folder)
        return folder

    def release(self) -> None:
        """Remove what `fetch` made for this process."""
        with _copies_lock:
            for key in [key for key in _copies if key[:2] == (os.getpid(), self.location)]:
                temporary.discard(_copies.pop(key).folder)

    # -- writing ---------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> str | None:
        """The name of the save that was staged; None before and after."""
        return self._generation

    def staging(self) -> str:
        """Return the path of the local folder that `stage` made.

        Raises:
            RuntimeError: this object has staged nothing.
        """
        if self._staged is None:
            raise RuntimeError(f"Nothing is staged for {self.location} here: call stage() first, on the same object.")
        return self._staged

    def stage(self, save: str = "") -> str:
        """Make an empty folder in ``$TMPDIR``, and remove what killed saves left in the store. One process of each node.

        Args:
            save: name of the save, the same on all machines.

        Raises:
            NotADirectoryError: an object has the place itself.
            OSError: the store or the local disk refuses.
        """
        if self._staged is not None:
            self.abandon()
        self._clear()
        now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        self._staged = temporary.make()
        # The other nodes' places are not told when the checkpoint has been published; they are dropped.
        self._discarded = weakref.finalize(self, temporary.discard, self._staged)
        self._generation = f"g-{now}-{secrets.token_hex(8)}"
        return self._staged

    def join(self, generation: str) -> None:
        """Upload into the save of another node. Each process that staged calls it, before any of them uploads.

        Args:
            generation: that of the process that is going to publish.

        Raises:
            ValueError: it is none.
        """
        if not _GENERATION.fullmatch(generation):
            raise ValueError(
                f"{generation!r} is no name of a save; give the `generation` of the place that publishes."
            )
        self.staging()
        self._generation = generation

    def upload(self, staged: str | None = None) -> None:
        """Move what this node has written to the store, but for the manifest. The process of each node that staged calls this.

        Args:
            staged: the folder; what `stage` returned by default.

        Raises:
            OSError: an object could not be written; its name is in the message.
        """
        folder = staged or self.staging()
        sizes: dict[str, int] = {}
        for where, _, files in os.walk(folder):
            for file in files:
                path = os.path.join(where, file)
                sizes[os.path.relpath(path, folder).replace(os.sep, "/")] = os.path.getsize(path)
        sizes.pop(NAME, None)

        def put(name: str) -> None:
            path = os.path.join(folder, *name.split("/"))
            self._store.put(path, f"{self._generation}/{name}")
            os.unlink(path)

        concurrently(put, sizes)

    def publish(self) -> None:
        """Upload what is not there yet, and let it take this place. The process with the manifest; all others have uploaded.

        Raises:
            DamagedCheckpoint: objects that the manifest names have not arrived whole; what was here before is still here.
            OSError: the store refuses; what was here before is still here.
        """
        folder, generation = self.staging(), str(self._generation)
        manifest = Manifest.read(folder)
        self.upload()
        found = _differences({name: entry.size for name, entry in manifest.files.items()}, self._sizes(generation))
        if found:
            raise DamagedCheckpoint(
                f"The checkpoint was not published at {self.location}: {'; '.join(found[:10])}. Each node must call upload() "
                "first, and only one run at a time may save here."
            )
        former = self._former()
        text = laid_out({"generation": generation, **json.loads(manifest.to_json())}) + "\n"
        self._store.write(NAME, text.encode())
        self._forget()
        try:
            self._clear(former)
        except OSError as error:
            logger.warning("The former checkpoint at %s could not be removed: %s", self.location, error)

    def _former(self) -> _Published | None:
        entries = self._store.entries()
        if entries.get(NAME) is None:
            return None
        try:
            return self._told(entries)
        except DamagedCheckpoint:
            return None

    def abandon(self) -> None:
        """Remove what was staged and uploaded. Whoever staged calls this; what was here before is still here."""
        generation = self._generation
        if generation is None:
            return
        self._forget()
        try:
            # An error may have come after the manifest was written, and then the generation is in use.
            marker = self._store.read(NAME)
            if marker is None or generation.encode() not in marker:
                self._store.remove_folder(generation)
        except OSError as error:
            logger.warning("An abandoned save at %s could not be removed: %s", self.location, error)

    def _forget(self) -> None:
        self._discarded()
        self._staged = self._generation = None

    # -- removing --------------------------------------------------------------------------------------------------

    def _superseded(self) -> tuple[dict[str, Stored], list[str]]:
        """The objects and the folders here that do not count any more: of killed saves, or of what has been replaced."""
        entries = self._store.entries()
        generations = [name for name in entries if _GENERATION.fullmatch(name)]
        parts = [name for name in entries if names.is_checkpoint_file(name)]
        current = None
        if entries.get(NAME) is not None:
            if len(generations) <= 1 and not parts:
                return {}, []  # the usual case, without another request
            try:
                current = self._told(entries)
            except DamagedCheckpoint:
                return {}, []  # somebody may still want to look at the parts
        generation = None if current is None else current.generation
        if generation is None:
            parts = []
        # What is no part of a checkpoint is the user's own.
        objects = {name: stored for name in parts if (stored := entries[name]) is not None}
        folders = [name for name in parts if entries[name] is None]
        return objects, [*folders, *(name for name in generations if name != generation)]

    def _clear(self, former: _Published | None = None) -> list[str]:
        """Remove what does not count any more; return what that was.

        Args:
            former: the checkpoint that was replaced just now.
        """
        objects, folders = self._superseded()
        chosen = list(objects)
        if former is not None and former.manifest is not None and former.generation is None:
            chosen += [name for name in former.sizes if name not in objects and name.split("/")[0] not in folders]
        self._store.remove(chosen)
        for folder in folders:
            self._store.remove_folder(folder)
        return [self._store.url(name) for name in [*chosen, *folders]]

    def remove(self) -> None:
        """Remove the checkpoint with all that lies here; nobody takes a part of it for a checkpoint meanwhile."""
        entries = self._store.entries()
        if any(name != NAME and not _GENERATION.fullmatch(name) for name in entries):
            self._store.write(names.INCOMPLETE_MARKER, b"")
        self._store.remove([NAME] if NAME in entries else [])
        self._store.remove([name for name in self._store.below() if name != names.INCOMPLETE_MARKER])
        self._store.remove_folder()
        self.release()

    def sweep(self) -> list[str]:
        """Remove what killed saves left in here and in its folders. Only the process that writes here calls it.

        Returns:
            The URLs removed.
        """
        removed = []
        for place in self._places():
            if gone := place._clear():
                removed += gone
                if place is not self and not place._store.entries():
                    place._store.remove_folder()  # a file system with real folders keeps the empty one
        return removed


# -- local copies ------------------------------------------------------------------------------------------------------


class _Copy:
    def __init__(self) -> None:
        self.folder = temporary.make()
        self.lock = Lock()


_copies: dict[tuple[int, str, str], _Copy] = {}
_copies_lock = Lock()


def _copy_of(location: str, published: _Published) -> _Copy:
    with _copies_lock:
        key = (os.getpid(), location, published.key)
        if key not in _copies or not os.path.isdir(_copies[key].folder):
            _copies[key] = _Copy()
        return _copies[key]


# -- helpers -----------------------------------------------------------------------------------------------------------


def _differences(expected: Mapping[str, int], there: Mapping[str, int]) -> list[str]:
    found = []
    for name in sorted(expected):
        if name not in there:
            found.append(f"{name} is missing ({expected[name]} bytes were written)")
        elif there[name] != expected[name]:
            found.append(f"{name} has {there[name]} bytes, but {expected[name]} were written")
    return found


def _refuse_marked(entries: Mapping[str, Stored | None]) -> None:
    if any(entry.startswith(names.INCOMPLETE_MARKER) for entry in entries):
        raise DamagedCheckpoint("its saving did not come to its end")


def _digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()
