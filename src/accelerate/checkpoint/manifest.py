"""The names of a checkpoint's files, and the manifest that lists them: by it a reader knows that a checkpoint is complete.

The manifest is JSON, is written last, and has every file of the checkpoint with its size and checksum. A folder without one is no
checkpoint of ours. Details of a file that another rank than the publisher wrote are in that rank's part of the manifest, so that
nobody gathers them. docs/checkpoint-format.md describes the format. Nothing here imports torch, but for the versions of a new manifest.
"""

import contextlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from accelerate.runtime import durable
from accelerate.runtime.durable import Path, is_inside

NAME = "accelerate_manifest.json"
PARTS_FOLDER = "accelerate_manifest_parts"
# Threads that read parts: small files, each of which a network's file system takes a moment to open.
_READERS = 8
FORMAT = 2

# -- names of files and folders ----------------------------------------------------------------------------------------

# What upstream has as well is called as there: see `accelerate.utils.constants`.
CUSTOM_NAME = "custom_checkpoint"
CHECKPOINTS_FOLDER = "checkpoints"

# Which parameter each number in an optimizer's file means: names by position, for each group. Torch's format does not have them.
PARAMETER_NAMES = "parameter_names.json"

# The optimizer in a checkpoint of transformers' Trainer: numbered, as in torch's own state.
TRAINERS_OPTIMIZER = "optimizer.pt"

# What the index of several files of weights has behind the name that one file would have.
INDEX_SUFFIX = ".index.json"

# Lies in a folder of torch's distributed checkpoints.
METADATA = ".metadata"

# Lies in a folder from before its first file is written until after its last one is: the writer's of the shared files, and
# with a number behind it that of another rank, which may come first.
INCOMPLETE_MARKER = ".incomplete"

# A file that a process holds locked while it saves there. One that no process holds means nothing.
LOCK_PREFIX = ".lock_"

# A number in a name, as Python writes it: no leading zeros, and no digits of other scripts. Another name is the user's own.
NUMBER = "(?:0|[1-9][0-9]*)"
_PARTS = re.compile(
    rf"(?:rank{NUMBER}_)?(?:pytorch_model|model|optimizer|scheduler|dl_state_dict)(?:_{NUMBER})?\.(?:bin|safetensors)"
    rf"|scaler\.pt|(?:random_states|custom_checkpoint)_{NUMBER}\.pkl|generators_{NUMBER}\.safetensors|parameter_names\.json"
    # Of sharded layouts. A folder without a number is the user's own.
    rf"|(?:pytorch_model_fsdp|optimizer)_{NUMBER}|(?:pytorch_model_fsdp|optimizer)(?:_{NUMBER})?(?:_rank{NUMBER})?\.bin"
    rf"|\.incomplete(?:_{NUMBER})?|{PARTS_FOLDER}"
)


def indexed(stem: str, index: int, extension: str) -> str:
    """Return the name of a file; the first object of a kind has no number, so that the usual checkpoint reads plainly."""
    return f"{stem}{extension}" if index == 0 else f"{stem}_{index}{extension}"


def model_file(index: int, safe_serialization: bool = True) -> str:
    """Return the name of the file with a model's weights."""
    return indexed("model", index, ".safetensors") if safe_serialization else indexed("pytorch_model", index, ".bin")


def optimizer_file(index: int) -> str:
    """Return the name of the file with an optimizer's state."""
    return indexed("optimizer", index, ".bin")


def scheduler_file(index: int) -> str:
    """Return the name of the file with a scheduler's state."""
    return indexed("scheduler", index, ".bin")


def dataloader_file(index: int) -> str:
    """Return the name of the file with a stateful loader's state, which all ranks can use."""
    return indexed("dl_state_dict", index, ".bin")


def custom_file(index: int) -> str:
    """Return the name of the file with the state of a registered object."""
    return f"{CUSTOM_NAME}_{index}.pkl"


def random_states_file(process_index: int) -> str:
    """Return the name of the file with the random states of one rank."""
    return f"random_states_{process_index}.pkl"


def part_file(process_index: int) -> str:
    """Return the name of a rank's part of the manifest."""
    return f"{PARTS_FOLDER}/{process_index}.json"


def numbered_folder(number: int) -> str:
    """Return the name of an automatically named checkpoint."""
    return f"checkpoint_{number}"


def number_of(folder: Path) -> int | None:
    """Return the number of an automatically named checkpoint, by its name or path, or None for another name."""
    match = re.fullmatch(f"checkpoint_({NUMBER})", os.path.basename(os.path.normpath(os.fspath(folder))))
    return int(match[1]) if match else None


def is_ours_alone(name: str) -> bool:
    """Return whether an entry of a folder shows that `save_state` wrote it, with a manifest; format 1 had files of generators."""
    return (
        name in (PARTS_FOLDER, PARAMETER_NAMES) or re.fullmatch(rf"generators_{NUMBER}\.safetensors", name) is not None
    )


def is_checkpoint_file(name: str) -> bool:
    """Return whether an entry directly in a folder has a name that a checkpoint's files have, ours or upstream's."""
    return _PARTS.fullmatch(name) is not None


def is_shard_file(name: str) -> bool:
    """Return whether a file has a name that torch gives to the files of a folder of shards."""
    return re.fullmatch(rf"__{NUMBER}_{NUMBER}\.distcp|\.metadata", name) is not None


# -- the manifest ------------------------------------------------------------------------------------------------------


class DamagedCheckpoint(RuntimeError):
    """A checkpoint is not what its manifest says; nothing was loaded from it."""


class UnreadableManifest(DamagedCheckpoint):
    """The manifest of a checkpoint, which was saved to its end, cannot be read here: a later version wrote it, for one."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file; `dtype` as safetensors names it: ``"F32"``, ``"BF16"``."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint.

    Attributes:
        checksum: see `accelerate.runtime.durable`.
        rank: the one that wrote it.
        digests: those of its pieces of ``durable.CHUNK`` bytes, one after the other; empty for a single piece, and in format 1.
        tensors: for a file of weights its tensors by name, else None.
        aliases: names that share the memory of another one and are not in the file, to that one's name.
    """

    size: int
    checksum: str
    rank: int = 0
    digests: str = ""
    tensors: Mapping[str, TensorEntry] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, file: durable.HashedFile, rank: int = 0, **more: Any) -> "FileEntry":
        """Return the entry of a file that this rank wrote just now; `more` may have ``tensors`` and ``aliases``."""
        checksum = file.raw.checksum
        return cls.made(checksum.size, checksum.digests(), rank, **more)

    @classmethod
    def made(cls, size: int, pieces: Sequence[bytes], rank: int = 0, **more: Any) -> "FileEntry":
        """Return the entry of a file by the digests of its pieces."""
        return cls(size, durable.combined(pieces), rank, b"".join(pieces).hex() if len(pieces) > 1 else "", **more)

    def brief(self) -> "FileEntry":
        """Return what the root says of a file whose details are in the part of a rank."""
        return FileEntry(self.size, self.checksum, self.rank)

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain data."""
        values: dict[str, Any] = {"size": self.size, "checksum": self.checksum, "rank": self.rank}
        if self.digests:
            values["digests"] = self.digests
        if self.tensors is not None:
            values["tensors"] = {name: vars(entry) for name, entry in self.tensors.items()}
        if self.aliases:
            values["aliases"] = dict(self.aliases)
        return values


def library_versions() -> dict[str, str]:
    """Return the versions of what writes a checkpoint here."""
    import numpy
    import torch

    return {
        # Of the package that runs: another distribution of the name may be next to it.
        "accelerate": getattr(sys.modules["accelerate"], "__version__", "unknown"),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of.

    Attributes:
        files: entries by path within the folder, with ``/`` between parts; those of which a rank has a part are brief.
        created: when, in UTC, ISO 8601.
        versions: of Python and of the libraries that wrote it.
        save: name of the save, the same on all machines that have a part of it, and no other save's.
        strategy: name of the backend that saved: ``"single"``, ``"ddp"``, ...
        mesh: sizes of the mesh dims by name, or None without a mesh.
        step: the run's count of batches within the accumulation step, as upstream counts.
        iteration: number of the checkpoint in its run.
        mark: what `mark` returned of the file that it was read from.
    """

    files: Mapping[str, FileEntry]
    format: int = FORMAT
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    versions: dict[str, str] = field(default_factory=library_versions)
    save: str = ""
    world_size: int = 1
    strategy: str = "single"
    mesh: dict[str, int] | None = None
    step: int = 0
    iteration: int = 0
    mark: tuple[int, ...] = field(default=(), repr=False, compare=False)

    def to_json(self, **more: Any) -> str:
        """Return the text, `more` values first."""
        values = {**more, **vars(self), "checksum": _CHECKSUM}
        return _text({key: values[key] for key in (*more, *_MANIFEST) if key != "files"}, self.files)

    @classmethod
    def from_json(cls, text: str | bytes, origin: str) -> "Manifest":
        """Return the manifest of a text that is not trusted; DamagedCheckpoint if it is none, or of a later format."""
        try:
            values = _checked({"": json.loads(text)}, _MANIFEST, ("format", "checksum", "files"))[""]
            if values["format"] > FORMAT:
                raise ValueError(f"format {values['format']} is newer than {FORMAT}; update accelerate to read it")
            if values.pop("checksum") != _CHECKSUM or values.get("world_size") == 0:
                raise ValueError(f"its checksums are not {_CHECKSUM}, or its world_size is 0")
            return cls(**{"created": "", "versions": {}, **values, "files": _entries(values["files"])})
        except (ValueError, RecursionError) as error:
            raise UnreadableManifest(f"{origin} is not a manifest of a checkpoint: {error}") from None

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Return the manifest in a local folder; FileNotFoundError without one, DamagedCheckpoint for a bad one."""
        path = os.path.join(folder, NAME)
        if os.path.lexists(path) and not os.path.isfile(path):  # a pipe, for one, would be waited for
            raise UnreadableManifest(f"{path} is no file, so that the manifest cannot be read.")
        try:
            with open(path, "rb") as file:
                found = _mark(file.fileno())
                return replace(cls.from_json(file.read(), path), mark=found)
        except PermissionError as error:
            raise UnreadableManifest(f"{path} could not be read: {error}") from error

    def detailed(self, folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
        """Return the full entries of files; of the parts of the manifest, those of the ranks that wrote them are read.

        DamagedCheckpoint if a part is not what the manifest says.
        """
        found: dict[str, FileEntry] = {}
        of_ranks: dict[int, list[str]] = {}
        for name in names:
            found[name] = self.files[name]
            of_ranks.setdefault(found[name].rank, []).append(name)
        for rank, theirs in sorted(of_ranks.items()):
            if (part := self.files.get(part_file(rank))) is None:  # the publisher, and every rank in format 1
                continue
            entries = {part_file(rank): part, **read_part(folder, rank, part.checksum)}
            for name in theirs:
                if (entry := entries.get(name)) is None or entry.brief() != found[name].brief():
                    raise DamagedCheckpoint(
                        f"{part_file(rank)} in {os.fspath(folder)!r} does not say of {name} what {NAME} says."
                    )
                found[name] = entry
        return found

    def write(self, folder: Path) -> None:
        """Write the manifest into a local folder with all the files, durably. It is there in full, or not at all."""
        with durable.durable(os.path.join(folder, NAME)) as file:
            file.write(self.to_json().encode())


def mark(folder: Path) -> tuple[int, ...]:
    """Return what tells the manifest in a local folder from that of another save, without reading it; nothing without one."""
    path = os.path.join(folder, NAME)
    with contextlib.suppress(OSError):
        durable.require_file(path)
        with open(path, "rb") as file:  # only then do network file systems look for what other machines have written
            return _mark(file.fileno())
    return ()


def _mark(descriptor: int) -> tuple[int, ...]:
    about = os.fstat(descriptor)
    return about.st_ino, about.st_size, about.st_mtime_ns


def _text(values: Mapping[str, Any], files: Mapping[str, FileEntry]) -> str:
    """Return the text of a manifest, or of a part of it, with a line for each value and file, for people and `diff`."""
    listed = ",\n".join(
        [f"  {json.dumps(name)}: {json.dumps(entry.to_json())}" for name, entry in sorted(files.items())]
    )
    text = ""
    for key, value in values.items():
        text += f" {json.dumps(key)}: {json.dumps(value)},\n"
    return f'{{\n{text} "files": {{\n{listed}\n }}\n}}\n'


def save_name() -> str:
    """Return a name for a save that no other one has; names sort by time."""
    now = datetime.now(timezone.utc)
    # The microseconds let names of one second sort by time, too.
    return f"{now:%Y%m%dT%H%M%SZ}-{now.microsecond:05x}{os.urandom(8).hex()[5:]}"


def write_part(folder: Path, rank: int, entries: Mapping[str, FileEntry], create: Any = None) -> FileEntry:
    """Write a rank's part of the manifest into a staged folder; return its entry. `create` gives the file of a name."""
    os.makedirs(os.path.join(folder, PARTS_FOLDER), exist_ok=True)
    name = part_file(rank)
    with create(name) if create else durable.HashedFile(durable.DiskFile(os.path.join(folder, name))) as file:
        file.write(_text({}, entries).encode())
    return FileEntry.of(file, rank)


def parts(folder: Path, ranks: Iterable[int], written: int = 0) -> dict[int, bytes]:
    """Return the parts in a staged folder, by rank; ranks have `written` so many."""
    found: dict[int, bytes] = {}

    def read(rank: int) -> None:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, part_file(rank)), "rb") as file:
            found[rank] = file.read()

    listed = files_below(os.path.join(folder, PARTS_FOLDER))
    durable.each(read, [rank for rank in ranks if f"{rank}.json" in listed], _READERS)
    if len(found) < written:  # the listing of a network's file system may be older than what other nodes have written
        durable.each(read, [rank for rank in ranks if rank not in found], _READERS)
    return dict(sorted(found.items()))


def gathered(parts: Mapping[int, bytes]) -> dict[str, FileEntry]:
    """Return what the root says of the parts of ranks, and of the files that these list."""
    found = {}
    for rank, text in parts.items():
        found[part_file(rank)] = FileEntry.made(len(text), durable.Checksum(text).digests(), rank)
        listed = parsed_part(text, rank, None, part_file(rank))
        found |= {name: entry.brief() for name, entry in listed.items()}
    return found


def read_part(folder: Path, rank: int, checksum: str | None = None) -> dict[str, FileEntry]:
    """Return what a rank's part in a local folder says; DamagedCheckpoint if it is none, or does not have the checksum."""
    path = os.path.join(folder, part_file(rank))
    try:
        durable.require_file(path)
        with open(path, "rb") as file:
            return parsed_part(file.read(), rank, checksum, path)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} could not be read: {error}") from error


def parsed_part(text: bytes, rank: int, checksum: str | None, origin: str) -> dict[str, FileEntry]:
    """Return what the text of a part says, which is not trusted."""
    try:
        if checksum is not None and (present := durable.Checksum(text).hexdigest()) != checksum:
            raise ValueError(f"its checksum is {present}, but {checksum} was written")
        files = _entries(_checked({"": json.loads(text)}, {"files": (dict,)}, ("files",))[""]["files"])
        if others := [name for name, entry in files.items() if entry.rank != rank]:
            raise ValueError(f"{others[0]!r:.80} is of another rank")
        return files
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{origin} is not the part of a manifest that rank {rank} wrote: {error}") from None


# -- what a manifest may say -------------------------------------------------------------------------------------------


def weight_map(text: bytes | str, origin: str) -> dict[str, list[str]]:
    """Return the files of an index of shards, with the tensors in each; DamagedCheckpoint if it is no index."""
    files: dict[str, list[str]] = {}
    try:
        for name, file in json.loads(text)["weight_map"].items():
            if not is_inside(file):
                raise ValueError(file)
            files.setdefault(file, []).append(name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedCheckpoint(
            f"{origin} is no index of shards: it has no weight_map of tensors and files in its folder"
        ) from None
    return files


_CHECKSUM = {"algorithm": durable.ALGORITHM, "chunk": durable.CHUNK}
# The keys of each mapping, in the order of the file, and the types of their values and of what is in these. Other keys are ignored.
_MANIFEST = {
    "format": (int,),
    "created": (str,),
    "versions": (dict, str),
    "save": (str,),
    "world_size": (int,),
    "strategy": (str,),
    "mesh": (dict, int),
    "step": (int,),
    "iteration": (int,),
    "checksum": (dict,),
    "files": (dict,),
}
_FILE = {
    "size": (int,),
    "checksum": (str,),
    "rank": (int,),
    "digests": (str,),
    "tensors": (dict,),
    "aliases": (dict, str),
}
_TENSOR = {"shape": (list, int), "dtype": (str,)}


def _checked(
    given: Mapping[str, Any], types: Mapping[str, tuple[type, ...]], required: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Return the known values of mappings that are not trusted, each compared with its type; null is no value, no number is below zero.

    The mappings are given by what an error calls them. A manifest has thousands of values, so all are looked at in one pass.
    """
    checked: dict[str, dict[str, Any]] = {}
    for where, data in given.items():
        place = f"{where}: " if where else ""
        if type(data) is not dict:
            raise ValueError(f"{place}{data!r:.80} is no mapping")
        values = checked[where] = {}
        for key, (kind, *inner) in types.items():
            value = data.get(key)
            if value is None:
                if key in required:
                    raise ValueError(f"{place}there is no {key}")
                continue
            fits = type(value) is kind
            inside: Iterable[Any] = (value,)
            if inner and fits:
                inside = value.values() if kind is dict else value
            for one in inside:
                fits = fits and type(one) is (inner[0] if inner else kind) and (type(one) is not int or one >= 0)
            if not fits:
                raise ValueError(f"{place}{key} cannot be {value!r:.80}")
            values[key] = value
    return checked


def _entries(files: Mapping[str, Any]) -> dict[str, FileEntry]:
    """Return the entries of files, of which neither the names nor what they say is trusted."""
    if bad := durable.outside(files) or [NAME] * (NAME in files):
        raise ValueError(f"the file name {bad[0]!r:.80} leads out of the folder")
    found = {}
    for name, values in _checked(files, _FILE, ("size", "checksum")).items():
        # A reader must take no other file for the part of a rank.
        if f"{name}/".startswith(f"{PARTS_FOLDER}/") and name != part_file(values.get("rank", 0)):
            raise ValueError(f"the file name {name!r:.80} is not that of the rank that wrote it")
        if digests := values.get("digests"):
            if len(digests) != 32 * -(-values["size"] // durable.CHUNK) or not re.fullmatch("[0-9a-f]+", digests):
                raise ValueError(f"{name}: digests cannot be {digests!r:.80}")
            if durable.combined([bytes.fromhex(digests)]) != values["checksum"]:
                raise ValueError(f"{name}: digests are not those of the checksum {values['checksum']!r:.80}")
        if "tensors" in values:
            try:
                tensors = _checked(values["tensors"], _TENSOR, _TENSOR)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            values["tensors"] = {key: TensorEntry(tuple(one["shape"]), one["dtype"]) for key, one in tensors.items()}
        found[name] = FileEntry(**values)
    return found


# -- comparing it with the files ---------------------------------------------------------------------------------------


def problems(folder: Path, manifest: Manifest, *, deep: bool = False) -> list[str]:
    """Return a line for each file of a checkpoint that is wrong, none if it is complete; `deep` reads the files."""
    found = []
    for name, entry in sorted(manifest.files.items()):
        path = os.path.join(folder, *name.split("/"))
        try:
            size = os.stat(path).st_size if os.path.isfile(path) else None
            if size != entry.size:
                found.append(difference(name, entry.size, size))
            elif deep:
                found += changed(name, entry, durable.of_file(path)[1])
        except OSError as error:
            found.append(f"{name} could not be read: {error}")
    # A reader would take these files for parts of the checkpoint.
    listed = {name.split("/")[0] for name in manifest.files}
    with contextlib.suppress(OSError):
        extra = sorted(entry for entry in os.listdir(folder) if is_checkpoint_file(entry) and entry not in listed)
        found += [f"{entry} is not in the manifest: something else has put it there" for entry in extra]
    return found


def changed(name: str, entry: FileEntry, digest: str) -> list[str]:
    """Return what is wrong with a file of this checksum; nothing if that is what was written."""
    line = f"{name} has changed: its checksum is {digest}, but {entry.checksum} was written"
    return [line] if digest != entry.checksum else []


def difference(name: str, written: int, size: int | None) -> str:
    """Return what is wrong with the size of a file; None stands for a file that is missing."""
    if size is None:
        return f"{name} is missing ({written} bytes were written)"
    return f"{name} has {size} bytes, but {written} were written"


def files_below(folder: Path) -> set[str]:
    """Return the paths of the files below a local folder, with ``/`` between parts."""
    paths = set()
    for where, _, files in os.walk(folder):
        for file in files:
            paths.add(os.path.relpath(os.path.join(where, file), folder).replace(os.sep, "/"))
    return paths


def first_of(lines: Sequence[str], most: int = 10) -> list[str]:
    """Return the first lines of a list for a message, and how many more there are."""
    more = len(lines) - most
    return [*lines[:most], *([f"and {more} more"] if more > 0 else [])]


def damaged(folder: Path, found: Iterable[str]) -> DamagedCheckpoint:
    """Return the error for a checkpoint in a folder, or at a location, with what `problems` returned."""
    listed = "\n  ".join(first_of(list(found)))
    return DamagedCheckpoint(
        f"The checkpoint {os.fspath(folder)!r} is damaged; nothing was loaded.\n  {listed}\n"
        "Load another one: `accelerate checkpoint ls` lists them, `load_state(latest=True)` takes the newest whole one. If you changed "
        f"the files on purpose, accept them: accelerate checkpoint accept {shlex.quote(os.fspath(folder))}"
    )
