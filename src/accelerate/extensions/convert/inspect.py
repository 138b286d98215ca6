"""Looking at checkpoints without loading them: which there are, whether they are complete, what is in them, and which may go.

Nothing here needs a GPU or a process group. Nothing is changed, no file is trusted, and no code in a file runs. Torch is
imported only for folders of shards, whose metadata is torch's, and to verify files without a manifest, as safetensors is.
"""

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from accelerate.checkpoint import manifest
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, FileEntry, TensorEntry
from accelerate.checkpoint.storage import CheckpointStatus, CheckpointStorage, FileStat, LocalStorage
from accelerate.extensions.export.headers import header_of, tensors_of_shards

# -- which there are ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """A checkpoint among others.

    Attributes:
        name: its path below the folder that was looked at.
        size: bytes of its files.
        saved: when it was saved or, if it is not whole, last written to, in seconds since 1970; None where not known.
    """

    name: str
    storage: CheckpointStorage
    state: CheckpointStatus
    size: int
    saved: float | None

    @property
    def number(self) -> int | None:
        """The number of an automatically named checkpoint; None for others."""
        return manifest.number_of(self.storage.name)

    @property
    def age(self) -> float | None:
        """The seconds since it was saved."""
        return None if self.saved is None else max(0.0, time.time() - self.saved)

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        saved, age, listing = self.saved, self.age, self.state.manifest
        return {
            "name": self.name,
            "location": self.storage.location,
            "number": self.number,
            "state": self.state.kind,
            "reason": self.state.reason,
            "size": self.size,
            "saved": None if saved is None else datetime.fromtimestamp(saved, timezone.utc).isoformat(),
            "age": None if age is None else round(age, 3),
            **{key: getattr(listing, key, None) for key in ("step", "iteration", "world_size", "strategy")},
        }


def summarize(storage: CheckpointStorage, name: str | None = None) -> Summary:
    """Return what a table says of a checkpoint."""
    name, state = storage.name if name is None else name, storage.state()
    if state.kind == "complete" and state.manifest is not None:
        with contextlib.suppress(ValueError, OverflowError):  # the manifest's date may be any text
            saved = datetime.fromisoformat(state.manifest.created)
            saved = saved.replace(tzinfo=saved.tzinfo or timezone.utc)
            size = sum(entry.size for entry in state.manifest.files.values())
            return Summary(name, storage, state, size, saved.timestamp())
    stored = storage.stored()
    return Summary(name, storage, state, stored.size, stored.modified)


def survey(folder: CheckpointStorage) -> list[Summary]:
    """Return the checkpoints of a folder, whole or not, newest last; FileNotFoundError if there is no such folder.

    Those are the folder itself, if it is one, or those directly in it and in its folder ``checkpoints``; no links.
    """
    if NAME in folder.files():
        return [summarize(folder)]
    inner = folder.child(manifest.CHECKPOINTS_FOLDER)
    found: list[Summary] = []
    for home, prefix in ((folder, ""), (inner, f"{manifest.CHECKPOINTS_FOLDER}/")):
        try:
            entries = home.entries()
        except PermissionError as error:
            if home is folder:
                raise
            state = CheckpointStatus("incomplete", f"it cannot be read: {error.strerror}", unread=True)
            found.append(Summary(manifest.CHECKPOINTS_FOLDER, home, state, 0, None))
            continue
        # What a link leads to lies elsewhere, or is there already.
        entries = [entry for entry in entries if entry.parent() == home and _is_one(entry)]
        found += [summarize(entry, prefix + entry.name) for entry in entries]
    if not found and (state := folder.state()).kind == "absent":
        raise FileNotFoundError(f"{folder.location!r}: {state.reason}.")
    if not found and folder.has_checkpoint_files():
        return [summarize(folder)]
    return sorted(found, key=lambda one: (one.saved or 0.0, one.name))


def _is_one(storage: CheckpointStorage) -> bool:
    return manifest.number_of(storage.name) is not None or storage.has_checkpoint_files()


def all_files(storage: CheckpointStorage) -> dict[str, int]:
    """Return the sizes of a checkpoint's files, by path with ``/`` between parts; what links lead to is omitted."""
    found = {name: stored.size for name, stored in storage.files().items()}
    for entry in storage.entries():
        if not isinstance(entry, LocalStorage) or entry.parent() == storage:  # an object store has folders between
            found |= {f"{entry.name}/{name}": size for name, size in all_files(entry).items()}
    return found


# -- whether they are complete --------------------------------------------------------------------------------------------


def verify(summary: Summary) -> list[str]:
    """Compare all files with their checksums; return a line for each that is wrong. Of a foreign one, those that no reader can open."""
    state = summary.state
    if state.kind == "foreign" and isinstance(summary.storage, LocalStorage):
        from accelerate.checkpoint.layouts import unreadable  # here: with torch

        return unreadable(summary.storage.fetch())
    if state.manifest is None:
        return [] if state.kind == "foreign" else [state.reason]
    try:
        return manifest.problems(summary.storage.fetch(), state.manifest, deep=True)
    except (DamagedCheckpoint, OSError) as error:
        return [str(error)]


# -- what is in them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Details:
    """What a checkpoint consists of.

    Attributes:
        files: entries by path, with tensors as far as they are known without reading the weights; those of shards
            are in the entry of ``.metadata`` next to them. Without a manifest, checksums and ranks mean nothing.
    """

    summary: Summary
    files: Mapping[str, FileEntry]

    @property
    def tensors(self) -> dict[str, Mapping[str, TensorEntry]]:
        """The tensors of each file of weights, by name."""
        return {name: entry.tensors for name, entry in self.files.items() if entry.tensors is not None}

    @property
    def dtypes(self) -> dict[str, int]:
        """How many numbers the tensors have, by dtype, the commonest first."""
        counted: Counter[str] = Counter()
        for entries in self.tensors.values():
            for entry in entries.values():
                counted[entry.dtype] += math.prod(entry.shape)
        return dict(counted.most_common())

    def to_json(self, tensors: bool = False) -> dict[str, Any]:
        """Return the details as plain data, on request with a list of every tensor."""
        listing, dtypes = self.summary.state.manifest, self.dtypes
        ranks = {name: None if listing is None else entry.rank for name, entry in self.files.items()}
        count = sum(map(len, self.tensors.values()))
        values = {
            **self.summary.to_json(),
            "mesh": getattr(listing, "mesh", None),
            "versions": getattr(listing, "versions", {}),
            "files": {name: {"size": entry.size, "rank": ranks[name]} for name, entry in self.files.items()},
            "tensors": {"count": count, "parameters": sum(dtypes.values()), "dtypes": dtypes},
            "tied": {name: entry.aliases for name, entry in self.files.items() if entry.aliases},
        }
        if tensors:
            values["tensors"]["list"] = {
                file: {name: vars(entry) for name, entry in entries.items()} for file, entries in self.tensors.items()
            }
        return values


def details(storage: CheckpointStorage) -> Details:
    """Return what a checkpoint consists of; FileNotFoundError if there is none, which names those that are inside."""
    summary = summarize(storage)
    state = summary.state
    if state.kind == "absent":
        raise FileNotFoundError(f"{storage.location!r}: {state.reason}.")
    if state.manifest is not None:
        found = state.manifest.files
    elif _is_one(storage):
        found = {name: FileEntry(size, checksum="") for name, size in all_files(storage).items()}
    else:
        inside = [one.name for one in survey(storage)]
        hint = f" It holds {', '.join(inside)}: name one of them." if inside else ""
        raise FileNotFoundError(f"{storage.location!r} is no checkpoint.{hint}")
    files = {name: replace(entry, tensors=_tensors_of(storage, name, entry)) for name, entry in sorted(found.items())}
    return Details(summary, files)


def _tensors_of(storage: CheckpointStorage, name: str, entry: FileEntry) -> Mapping[str, TensorEntry] | None:
    """The tensors of a file of weights, as far as they are known without reading it whole."""
    if manifest.is_ours_alone(name):
        return None
    if entry.tensors is not None or not isinstance(storage, LocalStorage):
        return entry.tensors  # a remote file would have to come here whole
    path = os.path.join(storage.fetch(), *name.split("/"))
    with contextlib.suppress(DamagedCheckpoint, OSError):  # `verify` reports it
        if os.path.basename(path) == manifest.METADATA:
            return tensors_of_shards(os.path.dirname(path))
        return header_of(path) if name.endswith(".safetensors") else None
    return None


# -- which may go ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pruning:
    """What there is to remove, and what stays though a user may expect otherwise.

    Attributes:
        homes: the folders in which checkpoints lie: the one that was named, and its folder ``checkpoints``.
        elsewhere: the folder ``checkpoints`` if a link leads to it; nothing in it goes.
        old: whole checkpoints beyond those that are kept, oldest first.
        unfinished: checkpoints whose saving did not come to its end, or which lost a file.
        left: what saves and removals left behind, or are at work on, by location.
        unread: checkpoints that cannot be read here, which stay.
    """

    homes: list[CheckpointStorage]
    elsewhere: CheckpointStorage | None
    old: list[Summary] = field(default_factory=list)
    unfinished: list[Summary] = field(default_factory=list)
    left: dict[str, FileStat] = field(default_factory=dict)
    unread: list[Summary] = field(default_factory=list)


def plan_pruning(folder: CheckpointStorage, keep: int, foreign: bool = False) -> Pruning:
    """Decide what may be removed, and change nothing: all but the `keep` newest whole checkpoints of each folder.

    The newest one with a manifest always stays; `foreign` counts those without one as whole that have a checkpoint's files.
    ValueError for a `keep` below 1, or a folder that is a checkpoint; FileNotFoundError for none.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} would remove every checkpoint; keep at least 1.")
    found = survey(folder)
    if [one.storage for one in found] == [folder]:
        raise ValueError(f"{folder.location!r} is a checkpoint; name the folder that it is in.")
    inner = folder.child(manifest.CHECKPOINTS_FOLDER)
    plan = Pruning([folder, inner], None) if inner.parent() == folder else Pruning([folder], elsewhere=inner)
    for home in plan.homes:
        # By number; those of another folder are another run's.
        series = [one for one in found if one.number is not None and one.storage.parent() == home]
        series.sort(key=lambda one: one.number or 0)
        whole = [one for one in series if one.storage.counts(one.state, foreign)]
        newest = next((one for one in reversed(whole) if one.state.kind == "complete"), None)
        plan.old.extend(one for one in whole[:-keep] if one is not newest)
        plan.unread.extend(one for one in series if one.state.unread)
        plan.unfinished.extend(one for one in series if one.state.kind == "incomplete" and not one.state.unread)
        plan.left.update(home.leftovers())
    return plan
