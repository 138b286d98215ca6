"""Looking at checkpoints without loading them: which there are, whether they are whole, and what is in them.

Nothing here needs a GPU or a process group, and nothing is changed. Torch is loaded only for what another library has sharded,
and for the list of tensors in shards.
"""

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from accelerate.checkpoint import names
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, FileEntry, Manifest, TensorEntry, problems
from accelerate.checkpoint.storage import CheckpointStorage, LocalStorage, State
from accelerate.checkpoint.structure import (
    INDEX_SUFFIX,
    METADATA,
    header_of,
    problem_of,
    problems_of_shards,
    tensors_of_shards,
)
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME

# What the folder is called that was looked at, if it has files of a checkpoint, and others lie in it.
ITSELF = "."


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
        unread: it has a manifest that cannot be read here, such as one of a later version. Its saving came to its end, for the
            manifest is written last; whether it is whole nobody here can tell.
    """

    name: str
    place: CheckpointStorage
    state: State
    size: int
    saved: float | None
    unread: bool = False

    @property
    def number(self) -> int | None:
        """The number of an automatically named checkpoint; None for the folder that was looked at, if others lie in it."""
        return None if self.name == ITSELF else names.number_of(self.place.name)

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


def summarize(place: CheckpointStorage, name: str | None = None) -> Summary:
    """Return what a table says of a checkpoint.

    Args:
        place: where it is.
        name: how it is called there; the last part of its location by default.
    """
    name, state = place.name if name is None else name, place.state()
    if state.kind == "complete" and state.manifest is not None and (saved := _created(state.manifest)) is not None:
        return Summary(name, place, state, state.manifest.size, saved)
    stored = place.stored()
    return Summary(name, place, state, stored.size, stored.modified, _is_unread(place, state))


def _is_unread(place: CheckpointStorage, state: State) -> bool:
    if state.kind != "incomplete" or state.manifest is not None:
        return False
    files = place.files()
    if any(name.startswith(names.INCOMPLETE_MARKER) for name in files):
        return False  # of whatever was there before
    # A link, a pipe or a folder of that name is no file, and cannot be read either.
    return NAME in files or (isinstance(place, LocalStorage) and os.path.lexists(os.path.join(place.fetch(), NAME)))


def survey(folder: CheckpointStorage) -> list[Summary]:
    """Return the checkpoints at a place, whole or not, newest last.

    Those are the place itself, if it is one, or else the ones directly inside it and inside its folder ``checkpoints``. Symbolic
    links to others are left out.

    Args:
        folder: a checkpoint, a folder of checkpoints, or a project's folder.
    """
    if folder.state().manifest is not None or NAME in folder.files():
        return [summarize(folder)]
    found = [(entry.name, entry) for entry in _inside(folder) if _is_one(entry)]
    inner = folder.child(names.CHECKPOINTS_FOLDER)
    found += [(f"{names.CHECKPOINTS_FOLDER}/{entry.name}", entry) for entry in _inside(inner) if _is_one(entry)]
    if not found:
        return [summarize(folder)] if looks_like_one(folder) else []
    summaries = [summarize(place, name) for name, place in found]
    if looks_like_one(folder):  # weights beside checkpoints, which are no part of them
        summaries.append(
            Summary(ITSELF, folder, folder.state(), sum(stored.size for stored in folder.files().values()), None)
        )
    return _in_order(summaries)


def _inside(folder: CheckpointStorage) -> list[CheckpointStorage]:
    """The folders that lie in another one, each once: what a link leads to lies elsewhere, or is there already."""
    return [entry for entry in dict.fromkeys(folder.entries()) if entry.parent() == folder]


def looks_like_one(place: CheckpointStorage) -> bool:
    """Say whether a folder has files of a checkpoint, ours or another library's.

    Args:
        place: the folder.
    """
    entries = [*place.files(), *(entry.name for entry in place.entries())]
    return any(entry == NAME or names.is_checkpoint_file(entry) for entry in entries)


def _is_one(place: CheckpointStorage) -> bool:
    return names.number_of(place.name) is not None or looks_like_one(place)


def _in_order(found: list[Summary]) -> list[Summary]:
    """Oldest first; in a series, numbers count more than times, which a copy changes."""
    by_time = sorted(found, key=lambda one: (one.saved or 0.0, one.name))
    following = {parent: iter(series) for parent, series in series_of(by_time).items()}
    return [one if one.number is None else next(following[one.place.parent()]) for one in by_time]


def series_of(found: Iterable[Summary]) -> dict[CheckpointStorage, list[Summary]]:
    """Return the automatically named checkpoints of each folder, by number: those of another folder are another run's.

    Args:
        found: checkpoints.
    """
    series: dict[CheckpointStorage, list[Summary]] = {}
    for one in found:
        if one.number is not None:
            series.setdefault(one.place.parent(), []).append(one)
    return {parent: sorted(members, key=lambda one: one.number or 0) for parent, members in series.items()}


def _created(manifest: Manifest) -> float | None:
    try:
        created = datetime.fromisoformat(manifest.created)
    except ValueError:
        return None
    return (created if created.tzinfo else created.replace(tzinfo=timezone.utc)).timestamp()


def all_files(place: CheckpointStorage) -> dict[str, int]:
    """Return the sizes of the files at a place and in the folders below it, by path with ``/`` between parts.

    Args:
        place: a checkpoint. Folders that symbolic links lead to are left out.
    """
    found = {name: stored.size for name, stored in place.files().items()}
    for entry in place.entries():
        if not isinstance(entry, LocalStorage) or entry.parent() == place:  # an object store has other folders between
            found.update((f"{entry.name}/{name}", size) for name, size in all_files(entry).items())
    return found


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
            which tells truncated files, missing shards and, for torch's format, changed ones.
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
    files = sorted(all_files(summary.place).items())
    sharded = {name.rpartition("/")[0] for name, _ in files if name.rpartition("/")[2] == METADATA}
    found = {
        f"{inner}/{name}".lstrip("/"): problem
        for inner in sharded
        for name, problem in problems_of_shards(os.path.join(folder, *inner.split("/"))).items()
    }
    for name, size in files:
        if name.rpartition("/")[0] not in sharded and (problem := problem_of(os.path.join(folder, *name.split("/")))):
            found[name] = problem
        if progress is not None:
            progress(size)
    return [f"{name} {problem}" for name, problem in sorted(found.items())]


# -- what is in them -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Details:
    """What a checkpoint consists of.

    Attributes:
        summary: as in a table.
        files: sizes by path.
        ranks: which rank wrote a file, where the manifest says so.
        tensors: the tensors of each file of weights, as far as they are known without reading the weights; those of shards by
            the file ``.metadata`` beside them.
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


def details(place: CheckpointStorage) -> Details:
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
        tensors={
            **{name: entry.tensors for name, entry in weights.items() if entry.tensors is not None},
            **dict(_tensors_in_shards(place, entries)),
        },
        aliases={name: entry.aliases for name, entry in weights.items() if entry.aliases},
    )


def _foreign_details(summary: Summary) -> Details:
    files = dict(sorted(all_files(summary.place).items()))
    tensors = dict(_tensors_in_shards(summary.place, files))
    for name in files:
        if not name.endswith(".safetensors") or names.is_generators_file(name) or "://" in summary.place.location:
            continue  # of a remote one the whole file would have to come here
        path = os.path.join(summary.place.fetch(), *name.split("/"))
        try:
            tensors[name] = {tensor: span.entry for tensor, span in header_of(path).items()}
        except (DamagedCheckpoint, OSError):
            continue  # `verify` says so
    return Details(summary, files, {}, tensors, {})


def _tensors_in_shards(
    place: CheckpointStorage, files: Iterable[str]
) -> Iterator[tuple[str, Mapping[str, TensorEntry]]]:
    if not isinstance(place, LocalStorage):
        return  # all of the shards would have to come here
    for name in sorted(files):
        inner, _, file = name.rpartition("/")
        if file == METADATA:
            with contextlib.suppress(DamagedCheckpoint, OSError):  # `verify` says so
                yield name, tensors_of_shards(os.path.join(place.fetch(), *inner.split("/")))


# -- where they have what ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Where a model or an optimizer lies in a checkpoint.

    Attributes:
        name: of its file, or index of files, or folder of shards.
        layout: whether that is whole or in shards.
    """

    name: str
    layout: Literal["full", "sharded"]


def part_of(files: Iterable[str], kind: Literal["model", "optimizer"], index: int, where: str) -> Part | None:
    """Return where a model or an optimizer lies in a checkpoint, or None if it is not there.

    Of weights in safetensors and in torch's format, as hubs keep them side by side, it is the safetensors.

    Args:
        files: the paths of the checkpoint's files: those that its manifest lists, if it has one.
        kind: what is looked for.
        index: which of the models or optimizers it is.
        where: the checkpoint, for messages.

    Raises:
        ValueError: it is there more than once, in layouts that different runs may have written.
    """
    present = set(files)
    if kind == "model":
        safe, pickled = names.model_file(index), names.model_file(index, safe_serialization=False)
        whole = [file for file in (safe, f"{safe}{INDEX_SUFFIX}") if file in present]
        whole = whole or [file for file in (pickled, f"{pickled}{INDEX_SUFFIX}") if file in present]
        whole += [f"{FSDP_MODEL_NAME}.bin" if index == 0 else f"{FSDP_MODEL_NAME}_{index}.bin"]
        folder = f"{FSDP_MODEL_NAME}_{index}"
    else:
        whole, folder = [names.optimizer_file(index)], f"{OPTIMIZER_NAME}_{index}"
    found = [Part(file, "full") for file in whole if file in present]
    found += [Part(folder, "sharded")] if f"{folder}/{METADATA}" in present else []
    if len(found) > 1:
        raise ValueError(
            f"{where!r} has {kind} {index} more than once: {' and '.join(part.name for part in found)}. Nothing tells which of "
            "them counts; move the others away."
        )
    return found[0] if found else None
