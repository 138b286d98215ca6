"""The manifest of a checkpoint: what belongs to it, and how a reader knows that it is whole.

It is JSON, is written last, and names every file of the checkpoint with its size and checksum. A folder without its manifest
is not a checkpoint of ours. The format is described in docs/checkpoint-format.md.
"""

import contextlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from accelerate.checkpoint import names
from accelerate.runtime import durable

NAME = "accelerate_manifest.json"
FORMAT = 1

# A manifest is some kilobytes for thousands of tensors; a file beyond this is something else, and is not parsed.
_LARGEST = 512 << 20

Path = str | os.PathLike[str]


class DamagedCheckpoint(RuntimeError):
    """A checkpoint is not what its manifest says; nothing was loaded from it."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file.

    Attributes:
        shape: its shape.
        dtype: its dtype, as safetensors names it: ``"F32"``, ``"BF16"``.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint.

    Attributes:
        size: in bytes.
        checksum: see `accelerate.runtime.durable`.
        rank: the one that wrote it.
        tensors: for a file of weights its tensors by name, else None.
        aliases: names that share the memory of another one and are not in the file, to that one's name.
    """

    size: int
    checksum: str
    rank: int = 0
    tensors: Mapping[str, TensorEntry] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, file: durable.DurableFile, rank: int = 0, **told: Any) -> "FileEntry":
        """Return what the manifest says of a file that was written just now.

        Args:
            file: it.
            rank: the one that wrote it.
            **told: ``tensors`` and ``aliases``.
        """
        return cls(file.checksum.size, file.checksum.hexdigest(), rank, **told)

    def to_json(self) -> dict[str, Any]:
        """Return what the manifest says of the file."""
        told: dict[str, Any] = {"size": self.size, "checksum": self.checksum, "rank": self.rank}
        if self.tensors is not None:
            told["tensors"] = {name: vars(entry) for name, entry in self.tensors.items()}
        if self.aliases:
            told["aliases"] = dict(self.aliases)
        return told

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "FileEntry":
        """Return the entry that `to_json` returned on another rank, or in a manifest that has been checked.

        Args:
            told: parsed JSON, which is not checked here.
        """
        tensors = told.get("tensors")
        if tensors is not None:
            tensors = {name: TensorEntry(tuple(entry["shape"]), entry["dtype"]) for name, entry in tensors.items()}
        return cls(told["size"], told["checksum"], told.get("rank", 0), tensors, told.get("aliases", {}))


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of.

    Attributes:
        files: entries by path within the folder, with ``/`` between parts.
        world_size: number of ranks that saved.
        strategy: name of the backend that saved: ``"single"``, ``"ddp"``, ...
        mesh: sizes of the mesh dims by name, or None without a mesh.
        step: the run's count of batches within the accumulation window, as upstream counts.
        iteration: number of the checkpoint in its run.
        created: when, in UTC, ISO 8601.
        versions: of Python and of the libraries that wrote it.
        save: name of the save, the same on all machines that have a part of it, and no other save's; empty if it had none.
        format: version of the format.
    """

    files: Mapping[str, FileEntry]
    world_size: int = 1
    strategy: str = "single"
    mesh: dict[str, int] | None = None
    step: int = 0
    iteration: int = 0
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    versions: dict[str, str] = field(default_factory=lambda: library_versions())
    save: str = ""
    format: int = FORMAT

    def to_json(self) -> str:
        """Return the text of the manifest."""
        files = {name: self.files[name].to_json() for name in sorted(self.files)}
        values = {**vars(self), "checksum": _CHECKSUM, "files": files}
        return laid_out({key: values[key] for key in _MANIFEST}) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, origin: str) -> "Manifest":
        """Return the manifest of a text.

        Args:
            text: JSON; nothing in it is trusted.
            origin: where it comes from, for messages.

        Raises:
            DamagedCheckpoint: it is not a manifest, or one of a later format.
        """
        where = f"{origin} is not a manifest of a checkpoint: "
        try:
            told = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{where}{error}") from None
        version = _checked(told, {"format": _MANIFEST["format"]}, where)["format"]
        if version > FORMAT:
            raise DamagedCheckpoint(f"{where}format {version} is newer than {FORMAT}; update accelerate to read it")
        values = _checked(told, _MANIFEST, where)
        del values["checksum"]
        files = values.pop("files")
        for name, entry in files.items():
            if not is_inside(name):
                raise DamagedCheckpoint(f"{where}the file name {name!r:.80} leads out of the folder")
            for tensor, spec in _checked(entry, _FILE, f"{where}{name}: ")["tensors"].items():
                _checked(spec, _TENSOR, f"{where}{name}: tensor {tensor!r}: ")
        return cls({name: FileEntry.from_json(entry) for name, entry in files.items()}, **values)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Return the manifest in a folder. Any rank, alone.

        Args:
            folder: a local folder.

        Raises:
            FileNotFoundError: there is none.
            DamagedCheckpoint: it cannot be read, or is not one.
        """
        path = os.path.join(folder, NAME)
        if os.path.lexists(path) and not os.path.isfile(path):  # a pipe, for one, would be waited for
            raise DamagedCheckpoint(f"{path} is no file, so that the manifest cannot be read.")
        if os.path.isfile(path) and os.path.getsize(path) > _LARGEST:
            raise DamagedCheckpoint(f"{path} has more than {_LARGEST} bytes, which no manifest has.")
        try:
            with open(path, "rb") as file:
                return cls.from_json(file.read(), path)
        except PermissionError as error:
            raise DamagedCheckpoint(f"{path} could not be read: {error}") from error

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, durably. It is there in full, or not at all.

        Args:
            folder: a local folder in which the files lie already.
        """
        with durable.durable(os.path.join(folder, NAME)) as file:
            file.write(self.to_json().encode())

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


def problems(
    folder: Path,
    manifest: Manifest,
    *,
    deep: bool = False,
    only: Callable[[str], bool] | None = None,
    progress: Callable[[int], None] | None = None,
    threads: int = 2,
) -> list[str]:
    """Return what is wrong with the files of a checkpoint; nothing if it is whole. Any rank, alone.

    Args:
        folder: its local folder.
        manifest: its manifest.
        deep: read the files and compare their checksums, too.
        only: which files to look at; all by default.
        progress: called with the number of bytes that were hashed.
        threads: how many pieces of a file are hashed at a time.

    Returns:
        A line per file, with what was expected and what is there.
    """
    found = []
    for name in filter(only, sorted(manifest.files)):
        entry, path = manifest.files[name], os.path.join(folder, *name.split("/"))
        try:
            size = os.stat(path).st_size if os.path.isfile(path) else None
            if size is None:
                found.append(f"{name} is missing ({entry.size} bytes were written)")
            elif size != entry.size:
                found.append(f"{name} has {size} bytes, but {entry.size} were written")
            elif deep and (digest := durable.of_file(path, threads, progress)[1]) != entry.checksum:
                found.append(f"{name} has changed: its checksum is {digest}, but {entry.checksum} was written")
        except OSError as error:
            found.append(f"{name} could not be read: {error}")
    if only is None:
        # A reader would take these files for parts of the checkpoint.
        listed = {name.split("/")[0] for name in manifest.files}
        with contextlib.suppress(OSError):
            found += [
                f"{entry} is not in the manifest: something else has put it there"
                for entry in sorted(os.listdir(folder))
                if entry not in listed and names.is_checkpoint_file(entry)
            ]
    return found


def damaged(folder: Path, found: Iterable[str]) -> DamagedCheckpoint:
    """Return the error for a checkpoint with problems.

    Args:
        folder: its folder or location.
        found: what `problems` returned.
    """
    lines = list(found)
    listed = "\n  ".join(lines[:10] + ([f"and {len(lines) - 10} more"] if len(lines) > 10 else []))
    return DamagedCheckpoint(
        f"The checkpoint {os.fspath(folder)!r} is damaged; nothing was loaded.\n  {listed}\n"
        "Load another one: `accelerate checkpoint ls` lists them, `load_state(latest=True)` takes the newest whole one."
    )


def library_versions() -> dict[str, str]:
    """Return the versions of what writes a checkpoint here."""
    import numpy
    import torch

    return {
        # Of the package that runs: another distribution of the name may lie beside it.
        "accelerate": getattr(sys.modules[__package__.partition(".")[0]], "__version__", "unknown"),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def is_inside(name: Any) -> bool:
    """Say whether a path of a manifest stays within its folder on every system.

    Args:
        name: what a manifest gives as the path of a file.
    """
    refused = "\\\0:" if os.name == "nt" else "\\\0"
    if not isinstance(name, str) or name == NAME or any(sign in name for sign in refused):
        return False
    return all(part not in ("", ".", "..") and part[1:2] != ":" for part in name.split("/"))


def laid_out(values: Mapping[str, Any]) -> str:
    """Return a manifest as JSON with a line for each value and for each file, so that people and `diff` can read it.

    Args:
        values: plain data.
    """
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items() if key != "files"]
    files = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in values["files"].items()]
    files_text = ' "files": {\n' + ",\n".join(files) + "\n }"
    return "{\n" + ",\n".join([*lines, files_text]) + "\n}"


_CHECKSUM = {"algorithm": durable.ALGORITHM, "chunk": durable.CHUNK}
# What a value of a manifest may be: the words of messages, and how such a value is recognized.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "number": lambda value: type(value) is int and value >= 0,
    "number above 0": lambda value: type(value) is int and value > 0,
    "text": lambda value: isinstance(value, str),
    "32 hexadecimal digits": lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None,
    "list of sizes": lambda value: isinstance(value, list) and all(map(_KINDS["number"], value)),
    "mapping": lambda value: isinstance(value, dict),
    "mapping with entries": lambda value: isinstance(value, dict) and len(value) > 0,
    "mapping of texts": lambda value: isinstance(value, dict) and all(map(_KINDS["text"], value.values())),
    "mapping of numbers": lambda value: isinstance(value, dict) and all(map(_KINDS["number"], value.values())),
    "mapping of numbers, or null": lambda value: value is None or _KINDS["mapping of numbers"](value),
    f"{_CHECKSUM}": lambda value: value == _CHECKSUM,
}
# The keys of each mapping, in the order of the file: the kind of the value, and what stands for a missing one. Where that is
# not of the kind, the key is required. Other keys are ignored.
_MANIFEST = {
    "format": ("number above 0", None),
    "created": ("text", ""),
    "versions": ("mapping of texts", {}),
    "save": ("text", ""),
    "world_size": ("number above 0", 1),
    "strategy": ("text", "single"),
    "mesh": ("mapping of numbers, or null", None),
    "step": ("number", 0),
    "iteration": ("number", 0),
    "checksum": (f"{_CHECKSUM}", None),
    "files": ("mapping with entries", None),
}
_FILE = {
    "size": ("number", None),
    "checksum": ("32 hexadecimal digits", None),
    "rank": ("number", 0),
    "tensors": ("mapping", {}),
    "aliases": ("mapping of texts", {}),
}
_TENSOR = {"shape": ("list of sizes", None), "dtype": ("text", None)}


def _checked(told: Any, fields: Mapping[str, tuple[str, Any]], where: str) -> dict[str, Any]:
    """Return the values of a mapping that is not trusted, after comparing each with its kind."""
    if not isinstance(told, dict):
        raise DamagedCheckpoint(f"{where}{told!r:.80} is no mapping")
    values = {}
    for key, (kind, default) in fields.items():
        values[key] = value = told.get(key, default)
        if not _KINDS[kind](value):
            raise DamagedCheckpoint(f"{where}{key} {value!r:.80} is no {kind}")
    return values
