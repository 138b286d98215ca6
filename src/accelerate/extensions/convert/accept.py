"""Accept files that a user has changed in a checkpoint: write the manifest again, for the present files."""

import contextlib
import os
import shutil
from dataclasses import replace

from accelerate.checkpoint import folders, formats, layouts, manifest
from accelerate.checkpoint.manifest import NAME, PARAMETER_NAMES, PARTS_FOLDER, DamagedCheckpoint, FileEntry, Manifest
from accelerate.checkpoint.storage import CheckpointStorage, LocalStorage, refuse_unfinished
from accelerate.extensions.export.headers import header_of
from accelerate.runtime import durable


def accept(storage: CheckpointStorage) -> list[str]:
    """Write the manifest of a checkpoint for its present files; return a line for each difference, none if nothing has changed.

    ValueError for a location that is not a local folder; FileNotFoundError without a manifest; DamagedCheckpoint for a save that did not end,
    a manifest that cannot be read, or a file that no reader can open: then nothing is changed.
    """
    if not isinstance(storage, LocalStorage):
        raise ValueError(f"{storage.location!r} is a URL. Copy the checkpoint to a local folder and accept it there.")
    if not os.path.isdir(storage.location):
        raise FileNotFoundError(f"There is no checkpoint in {storage.location!r}.")
    with storage.locked():
        return _accept(storage.location)


def _accept(folder: str) -> list[str]:
    names = os.listdir(folder)
    if NAME not in names:
        refuse_unfinished(names)
        raise FileNotFoundError(
            f"{folder!r} has no {NAME}, so its files load without verification, and there is nothing to accept."
        )
    if marker := next((name for name in names if name.startswith(manifest.INCOMPLETE_MARKER)), None):
        raise DamagedCheckpoint(f"{folder!r} has {marker}: its save was interrupted. Load another checkpoint.")
    try:
        listing = Manifest.read(folder)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(
            f"The manifest cannot be read. To load the files unverified, delete {NAME}, {PARTS_FOLDER} and {PARAMETER_NAMES}. {error}"
        ) from error
    former = _details(folder, listing)
    entries, lines = {}, []
    present = manifest.files_below(folder) - {NAME}
    for name in sorted(present | former.keys()):
        known = former.get(name)
        if name not in present:
            lines.append(manifest.difference(name, former[name].size, None))
            continue
        if known is None and not manifest.is_checkpoint_file(name.split("/")[0]):
            continue  # the user's own
        entry = _entry(os.path.join(folder, *name.split("/")), known)
        if known is None:
            lines.append(f"{name} is new")
        elif entry.size != known.size:
            lines.append(manifest.difference(name, known.size, entry.size))
        else:
            lines += manifest.changed(name, known, entry.checksum)
        if not _is_part(name):
            entries[name] = entry
    if not lines:
        return []
    if unreadable := layouts.unreadable(folder):
        raise DamagedCheckpoint(f"Nothing was accepted in {folder!r}: {'; '.join(manifest.first_of(unreadable))}")
    replace(listing, format=manifest.FORMAT, files=entries).write(folder)
    if folders.is_folder(parts := os.path.join(folder, PARTS_FOLDER)):  # the manifest has their details now
        shutil.rmtree(parts)
        durable.sync_folder(folder)
    return lines


def _is_part(name: str) -> bool:
    return name.startswith(f"{PARTS_FOLDER}/")


def _details(folder: str, listing: Manifest) -> dict[str, FileEntry]:
    """Return the entries of all files; in full, unless the part of the manifest that has them was changed."""
    files = dict(listing.files)
    for rank in {entry.rank for entry in files.values()}:
        with contextlib.suppress(DamagedCheckpoint):
            names = [name for name, entry in files.items() if entry.rank == rank and not _is_part(name)]
            files |= listing.detailed(folder, names)
    return files


def _entry(path: str, former: FileEntry | None) -> FileEntry:
    """Return the entry of a file with its present size and checksum."""
    entry = formats.describe(path, former.rank if former else 0, durable.threads())
    if not path.endswith(".safetensors"):
        return entry
    tensors = header_of(path)
    aliases = former.aliases if former else {}
    aliases = {name: kept for name, kept in aliases.items() if kept in tensors and name not in tensors}
    return replace(entry, tensors=tensors, aliases=aliases)
