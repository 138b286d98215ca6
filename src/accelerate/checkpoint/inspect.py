"""Looking at checkpoints without loading them: which there are, whether they are whole, and what is in them.

Nothing here needs torch, a GPU or a process group, and nothing is changed.
"""

import json
import math
import os
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from accelerate.checkpoint import names
from accelerate.checkpoint.manifest import (
    NAME,
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    TensorEntry,
    is_inside,
    problems,
)
from accelerate.checkpoint.places import Place, State

# The limit of the safetensors library.
_LARGEST_HEADER = 100_000_000
_ZIP = b"PK\x03\x04"


# -- which there are -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """A checkpoint among others.

    Attributes:
        name: its path below the folder that was looked at.
        place: where it is.
        state: whether it is whole.
        size: bytes of its files.
        saved: when it was saved or, if it is not whole, last written to, in seconds since 1970; None where that is not known.
    """

    name: str
    place: Place
    state: State
    size: int
    saved: float | None

    @property
    def number(self) -> int | None:
        """The number of an automatically named checkpoint."""
        return names.number_of(self.place.name)

    def age(self, now: float | None = None) -> float | None:
        """Return the seconds since it was saved.

        Args:
            now: seconds since 1970; the present by default.
        """
        return None if self.saved is None else max(0.0, (time.time() if now is None else now) - self.saved)

    def to_json(self, now: float | None = None) -> dict[str, Any]:
        """Return the summary as plain data.

        Args:
            now: what the age is counted from, in seconds since 1970.
        """
        manifest, age = self.state.manifest, self.age(now)
        return {
            "name": self.name,
            "location": self.place.location,
            "number": self.number,
            "state": self.state.kind,
            "reason": self.state.reason,
            "size": self.size,
            "saved": None if self.saved is None else datetime.fromtimestamp(self.saved, timezone.utc).isoformat(),
            "age": None if age is None else round(age, 3),
            "step": manifest and manifest.step,
            "iteration": manifest and manifest.iteration,
            "world_size": manifest and manifest.world_size,
            "strategy": manifest and manifest.strategy,
        }


def summarize(place: Place, name: str | None = None) -> Summary:
    """Return what a table says of a checkpoint.

    Args:
        place: where it is.
        name: how it is called there; the last part of its location by default.
    """
    name, state = place.name if name is None else name, place.state()
    if state.kind == "complete" and state.manifest is not None and (saved := _created(state.manifest)) is not None:
        return Summary(name, place, state, state.manifest.size, saved)
    stored = place.stored()
    return Summary(name, place, state, stored.size, stored.modified)


def survey(folder: Place) -> list[Summary]:
    """Return the checkpoints at a place, whole or not, newest last.

    Those are the place itself, if it is one, or else the ones directly inside it and inside its folder ``checkpoints``.

    Args:
        folder: a checkpoint, a folder of checkpoints, or a project's folder.
    """
    if folder.state().manifest is not None or NAME in folder.files():
        return [summarize(folder)]
    found = [(entry.name, entry) for entry in folder.entries() if _is_one(entry)]
    inner = folder.child(names.CHECKPOINTS_FOLDER)
    found += [(f"{inner.name}/{entry.name}", entry) for entry in inner.entries() if _is_one(entry)]
    if not found:
        return [summarize(folder)] if looks_like_one(folder) else []
    summaries = [summarize(place, name) for name, place in found]
    if looks_like_one(folder):  # weights beside checkpoints, which are no part of them
        summaries.append(
            Summary(".", folder, folder.state(), sum(stored.size for stored in folder.files().values()), None)
        )
    return _in_order(summaries)


def looks_like_one(place: Place) -> bool:
    """Say whether a folder has files of a checkpoint, ours or another library's.

    Args:
        place: the folder.
    """
    entries = [*place.files(), *(entry.name for entry in place.entries())]
    return any(entry == NAME or names.is_checkpoint_file(entry) for entry in entries)


def _is_one(place: Place) -> bool:
    return names.number_of(place.name) is not None or looks_like_one(place)


def _in_order(found: list[Summary]) -> list[Summary]:
    """Oldest first; numbers count more than times, which a copy changes."""
    by_time = sorted(found, key=lambda one: (one.saved or 0.0, one.name))
    numbered = sorted((one for one in by_time if one.number is not None), key=lambda one: one.number or 0)
    following = iter(numbered)
    return [next(following) if one.number is not None else one for one in by_time]


def _created(manifest: Manifest) -> float | None:
    try:
        created = datetime.fromisoformat(manifest.created)
    except ValueError:
        return None
    return (created if created.tzinfo else created.replace(tzinfo=timezone.utc)).timestamp()


def all_files(place: Place) -> dict[str, int]:
    """Return the sizes of the files at a place and in the folders below it, by path with ``/`` between parts.

    Args:
        place: a checkpoint.
    """
    found = {name: stored.size for name, stored in place.files().items()}
    for entry in place.entries():
        found.update((f"{entry.name}/{name}", size) for name, size in all_files(entry).items())
    return found


def surplus(found: Iterable[Summary], keep: int, foreign: bool = False) -> list[Summary]:
    """Return the automatically named checkpoints that are older than the newest ones, oldest first.

    Args:
        found: what `survey` returned.
        keep: how many stay, at least one.
        foreign: count, and return, those without a manifest, too; else they are left alone.

    Returns:
        Whole ones only. The newest one with a manifest is never among them.

    Raises:
        ValueError: `keep` is below one.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} would remove every checkpoint; keep at least 1.")
    kinds = ("complete", "foreign") if foreign else ("complete",)
    whole = [one for one in found if one.number is not None and one.state.kind in kinds]
    newest = next((one for one in reversed(whole) if one.state.kind == "complete"), None)
    return [one for one in whole[:-keep] if one is not newest]


# -- whether they are whole ----------------------------------------------------------------------------------------


def bytes_to_verify(summary: Summary) -> int:
    """Return how many bytes `verify` is going to read.

    Args:
        summary: of the checkpoint.
    """
    manifest = summary.state.manifest
    return summary.size if manifest is None else manifest.size


def verify(summary: Summary, progress: Callable[[int], None] | None = None) -> list[str]:
    """Read all files of a checkpoint and compare them with their checksums.

    Args:
        summary: of the checkpoint. Without a manifest there are no checksums: then the files' own structure is looked at,
            which tells truncated files and, for torch's format, changed ones.
        progress: called with numbers of bytes, from any thread.

    Returns:
        What is wrong, a line per file; nothing if it is whole.
    """
    state = summary.state
    if state.kind == "absent" or (state.kind == "incomplete" and state.manifest is None):
        return [state.reason]
    try:
        folder = summary.place.fetch()
    except (DamagedCheckpoint, OSError) as error:
        return [str(error)]
    if state.manifest is not None:
        return problems(folder, state.manifest, deep=True, progress=progress)
    found = []
    for name, size in sorted(all_files(summary.place).items()):
        problem = structure_problem(os.path.join(folder, *name.split("/")))
        if problem:
            found.append(f"{name} {problem}")
        if progress is not None:
            progress(size)
    return found


def structure_problem(path: str) -> str:
    """Return what is wrong with a file by its own account, or an empty text; formats without an account are fine.

    Args:
        path: a file of any format.
    """
    try:
        if path.endswith(".safetensors"):
            header_of(path)
        else:
            with open(path, "rb") as file:
                start = file.read(len(_ZIP))
            if start == _ZIP:
                with zipfile.ZipFile(path) as archive:
                    changed = archive.testzip()
                if changed is not None:
                    return f"has changed: the checksum of its part {changed} differs"
    except (DamagedCheckpoint, OSError, zipfile.BadZipFile, EOFError, ValueError) as error:
        return f"is damaged: {error}"
    return ""


# -- what is in them -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A tensor in a safetensors file.

    Attributes:
        entry: shape and dtype.
        start: where its bytes start in the file.
        end: where they end.
    """

    entry: TensorEntry
    start: int
    end: int


def header_of(path: str) -> dict[str, Span]:
    """Return the tensors of a safetensors file, by name, in the order of the file.

    Args:
        path: the file; nothing in it is trusted.

    Raises:
        DamagedCheckpoint: it is no safetensors file, or a truncated one.

    Source:
        https://huggingface.co/docs/safetensors/index#format
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise DamagedCheckpoint(f"a header of {length} bytes does not fit a file of {size}")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise DamagedCheckpoint("its header is no mapping")
    header.pop("__metadata__", None)
    spans = {name: _span(name, told, 8 + length) for name, told in header.items()}
    spans = dict(sorted(spans.items(), key=lambda item: (item[1].start, item[1].end)))
    position = 8 + length
    for name, span in spans.items():
        if span.start != position:
            raise DamagedCheckpoint(f"its tensor {name!r} starts at byte {span.start}, not at {position}")
        position = span.end
    if position != size:
        raise DamagedCheckpoint(f"it has {size} bytes, but its tensors end at {position}")
    return spans


def _span(name: str, told: Any, base: int) -> Span:
    try:
        (start, end), shape, dtype = told["data_offsets"], told["shape"], told["dtype"]
        sound = all(type(value) is int and value >= 0 for value in (start, end, *shape)) and isinstance(dtype, str)
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound or end < start:
        raise DamagedCheckpoint(f"its header says of the tensor {name!r} what cannot be")
    return Span(TensorEntry(tuple(shape), dtype), base + start, base + end)


@dataclass(frozen=True)
class Details:
    """What a checkpoint consists of.

    Attributes:
        summary: as in a table.
        files: sizes by path.
        ranks: which rank wrote a file, where the manifest says so.
        tensors: the tensors of each file of weights, as far as they are known without reading the weights.
        aliases: of each file the tied names, to the name under which the tensor is in the file.
    """

    summary: Summary
    files: Mapping[str, int]
    ranks: Mapping[str, int]
    tensors: Mapping[str, Mapping[str, TensorEntry]]
    aliases: Mapping[str, Mapping[str, str]]

    @property
    def parameters(self) -> int:
        """How many numbers the tensors have together."""
        return sum(self.dtypes.values())

    @property
    def tensor_count(self) -> int:
        """How many tensors there are."""
        return sum(map(len, self.tensors.values()))

    @property
    def dtypes(self) -> dict[str, int]:
        """How many numbers there are of each dtype, the commonest first."""
        counted: Counter[str] = Counter()
        for entries in self.tensors.values():
            for entry in entries.values():
                counted[entry.dtype] += math.prod(entry.shape)
        return dict(counted.most_common())

    def to_json(self, tensors: bool = False) -> dict[str, Any]:
        """Return the details as plain data.

        Args:
            tensors: list every tensor.
        """
        manifest = self.summary.state.manifest
        told = {
            **self.summary.to_json(),
            "mesh": None if manifest is None or manifest.mesh is None else dict(manifest.mesh),
            "versions": {} if manifest is None else dict(manifest.versions),
            "files": {name: {"size": size, "rank": self.ranks.get(name)} for name, size in self.files.items()},
            "tensors": {"count": self.tensor_count, "parameters": self.parameters, "dtypes": self.dtypes},
            "tied": {file: dict(tied) for file, tied in self.aliases.items()},
        }
        if tensors:
            told["tensors"]["list"] = {
                file: {name: {"shape": list(entry.shape), "dtype": entry.dtype} for name, entry in entries.items()}
                for file, entries in self.tensors.items()
            }
        return told


def details(place: Place) -> Details:
    """Return what a checkpoint consists of.

    Args:
        place: where it is.

    Raises:
        FileNotFoundError: there is none; the message names those that are inside.
    """
    state = place.state()
    if state.kind == "absent":
        raise FileNotFoundError(f"{place.location!r}: {state.reason}.")
    if state.manifest is None and not _is_one(place):
        inside = [one.name for one in survey(place)]
        hint = f" It holds {', '.join(inside)}: name one of them." if inside else ""
        raise FileNotFoundError(f"{place.location!r} is no checkpoint.{hint}")
    summary = summarize(place)
    if summary.state.manifest is None:
        return _foreign_details(summary)
    entries: Mapping[str, FileEntry] = summary.state.manifest.files
    weights = {name: entry for name, entry in entries.items() if not names.is_generators_file(name)}
    return Details(
        summary,
        files={name: entry.size for name, entry in sorted(entries.items())},
        ranks={name: entry.rank for name, entry in entries.items()},
        tensors={name: entry.tensors for name, entry in weights.items() if entry.tensors is not None},
        aliases={name: entry.aliases for name, entry in weights.items() if entry.aliases},
    )


def _foreign_details(summary: Summary) -> Details:
    files = dict(sorted(all_files(summary.place).items()))
    tensors = {}
    for name in files:
        if not name.endswith(".safetensors") or names.is_generators_file(name) or "://" in summary.place.location:
            continue  # of a remote one the whole file would have to come here
        path = os.path.join(summary.place.fetch(), *name.split("/"))
        try:
            tensors[name] = {tensor: span.entry for tensor, span in header_of(path).items()}
        except (DamagedCheckpoint, OSError):
            continue  # `verify` says so
    return Details(summary, files, {}, tensors, {})


def weight_map(text: bytes | str, origin: str) -> dict[str, list[str]]:
    """Return the files that an index of shards names, with the tensors in each.

    Args:
        text: the index, as Hugging Face writes it; nothing in it is trusted.
        origin: where it comes from, for messages.

    Raises:
        DamagedCheckpoint: it is no index.
    """
    try:
        told = json.loads(text)["weight_map"]
        sound = all(isinstance(name, str) and is_inside(file) for name, file in told.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise DamagedCheckpoint(
            f"{origin} is no index of shards: it has no weight_map of tensors and files in its folder"
        )
    files: dict[str, list[str]] = {}
    for name, file in told.items():
        files.setdefault(file, []).append(name)
    return files
