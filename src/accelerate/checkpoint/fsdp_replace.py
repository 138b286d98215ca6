"""Replacing what a checkpoint's folder has of a model or optimizer: whenever a save is killed, the old one or the new one is there.

Everything is written aside first. A folder of shards and a single file then take their place in one step. The files of ranks are
several, so that a note tells how many there are before the first one takes its place: whoever finds it goes on from there.
"""

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

from accelerate.checkpoint import disk, formats
from accelerate.checkpoint.fsdp_state import Layout, on_all, rank_and_size, together
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, FileEntry, Manifest
from accelerate.checkpoint.names import METADATA, REPLACED_PREFIX, STAGING_PREFIX

Path = str | os.PathLike[str]
Entries = dict[str, FileEntry]

_RANKS_PREFIX = ".ranks_"


def staged(folder: Path, name: str) -> str:
    """Return where a file or folder of a checkpoint is written, before it takes its place.

    Args:
        folder: the checkpoint's folder.
        name: of the file or folder in it.
    """
    return os.path.join(folder, STAGING_PREFIX + name)


def standing(folder: Path, name: str) -> str | None:
    """Return the name under which a folder of shards is whole, or None: a killed save may have put the old one aside.

    Args:
        folder: the checkpoint's folder.
        name: of the folder in it.
    """
    candidates = (name, REPLACED_PREFIX + name)
    return next((one for one in candidates if os.path.isfile(os.path.join(folder, one, METADATA))), None)


@contextlib.contextmanager
def replacing(folder: Path, name: str, layout: Layout, group: Any = None) -> Iterator[Entries]:
    """Let a block write what `staged` names; when it ends well on all ranks, that takes the place of what was there. All ranks.

    Args:
        folder: the checkpoint's folder, which all ranks see.
        name: of a folder or file; for a local layout the start of the names of the ranks' files.
        layout: how it is written.
        group: the ranks that do it; all by default.

    Yields:
        What the block puts the entries of this rank's files into, for a manifest that lists those before.

    Raises:
        RuntimeError: it failed on another rank; raised on all of them.
    """
    main = rank_and_size(group)[0] == 0

    def begin() -> None:
        if not main:
            return
        finish(folder, name)
        if layout == "sharded":
            _restore(folder, name)
            shutil.rmtree(staged(folder, name), ignore_errors=True)

    together(begin, group)
    entries: Entries = {}
    try:
        yield entries
    except BaseException:
        if layout == "sharded" and main:
            shutil.rmtree(staged(folder, name), ignore_errors=True)
        for file in entries:
            with contextlib.suppress(OSError):
                os.unlink(staged(folder, file))
        raise
    _publish(folder, name, layout, entries, group)


def _publish(folder: Path, name: str, layout: Layout, entries: Entries, group: Any) -> None:
    rank, size = rank_and_size(group)
    listed = together(lambda: _unlisted(folder, name, layout) if rank == 0 else None, group)

    def put() -> None:
        if rank != 0:
            return
        if layout == "sharded":
            _exchange(folder, name)
        elif layout == "full":
            os.replace(staged(folder, name), os.path.join(folder, name))
        else:
            formats.write_bytes(os.path.join(folder, _RANKS_PREFIX + name), str(size).encode())
            finish(folder, name)
        disk.sync_folder(os.fspath(folder))

    together(put, group)
    if not any(on_all(listed is not None, group)):
        return
    told = on_all(entries, group)

    def tell() -> None:
        if listed is not None:
            files = {file: entry for one in told for file, entry in one.items()}
            dataclasses.replace(listed, files={**listed.files, **files}).write(folder)
            disk.sync_folder(os.fspath(folder))

    together(tell, group)


def _restore(folder: Path, name: str) -> None:
    """Put a folder back that a killed save has put aside."""
    aside = standing(folder, name)
    if aside is not None and aside != name:
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
        os.rename(os.path.join(folder, aside), os.path.join(folder, name))


def _exchange(folder: Path, name: str) -> None:
    new, place, aside = (os.path.join(folder, prefix + name) for prefix in (STAGING_PREFIX, "", REPLACED_PREFIX))
    shutil.rmtree(aside, ignore_errors=True)
    if not os.path.lexists(place):
        os.rename(new, place)
        return
    if disk.exchange(new, place):
        shutil.rmtree(new, ignore_errors=True)
        return
    os.rename(place, aside)
    try:
        os.rename(new, place)
    except BaseException:
        os.rename(aside, place)
        raise
    disk.sync_folder(os.fspath(folder))
    shutil.rmtree(aside, ignore_errors=True)


def finish(folder: Path, stem: str) -> None:
    """Let the files of all ranks take their places, where a save was killed while they did. One process, alone.

    Args:
        folder: the checkpoint's folder.
        stem: the start of the names of the ranks' files.
    """
    note = os.path.join(folder, _RANKS_PREFIX + stem)
    try:
        with open(note, "rb") as file:
            size = int(file.read(20))
    except (FileNotFoundError, NotADirectoryError):
        return
    except ValueError:  # it was not written to its end, so no file has moved
        os.unlink(note)
        return
    pattern = re.compile(re.escape(stem) + r"_rank(\d+)\.bin")
    for file in os.listdir(folder):
        if (match := pattern.fullmatch(file)) and int(match.group(1)) >= size:
            os.unlink(os.path.join(folder, file))  # of a save on more ranks
    for rank in range(size):
        with contextlib.suppress(FileNotFoundError):  # it has its place
            os.replace(staged(folder, f"{stem}_rank{rank}.bin"), os.path.join(folder, f"{stem}_rank{rank}.bin"))
    disk.sync_folder(os.fspath(folder))
    os.unlink(note)


def _unlisted(folder: Path, name: str, layout: Layout) -> Manifest | None:
    """Take what is going to be replaced out of a manifest, and return the manifest without it; None if it lists nothing of it."""
    if not os.path.isfile(os.path.join(folder, NAME)):
        return None
    try:
        manifest = Manifest.read(folder)
    except DamagedCheckpoint:  # nobody loads by it
        return None
    pattern = re.compile(re.escape(name) + {"sharded": "/.*", "full": "", "local": r"_rank\d+\.bin"}[layout])
    kept = {file: entry for file, entry in manifest.files.items() if not pattern.fullmatch(file)}
    if len(kept) == len(manifest.files):
        return None
    manifest = dataclasses.replace(manifest, files=kept)
    if kept:
        manifest.write(folder)
    else:
        os.unlink(os.path.join(folder, NAME))
    disk.sync_folder(os.fspath(folder))
    return manifest
