"""The manifest of a checkpoint: what belongs to it, and how one knows that it is whole.

It is JSON, is written last, and names every file of the checkpoint with its size and checksum. A folder without its manifest
is not a checkpoint of ours; docs/reference of the format: docs/checkpoint-format.md.
"""

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
_DIGEST = re.compile(r"[0-9a-f]{32}")

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
        checksum: see `checkpoint.durable`.
        rank: who wrote it.
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
            rank: who wrote it.
            **told: ``tensors`` and ``aliases``.
        """
        return cls(file.checksum.size, file.checksum.hexdigest(), rank, **told)

    def to_json(self) -> dict[str, Any]:
        """Return what the manifest says of the file."""
        told: dict[str, Any] = {"size": self.size, "checksum": self.checksum, "rank": self.rank}
        if self.tensors is not None:
            told["tensors"] = {
                name: {"shape": list(entry.shape), "dtype": entry.dtype} for name, entry in self.tensors.items()
            }
        if self.aliases:
            told["aliases"] = dict(self.aliases)
        return told

    @classmethod
    def from_json(cls, told: Any, where: str) -> "FileEntry":
        """Return the entry that `to_json` told.

        Args:
            told: parsed JSON of any kind.
            where: the file it speaks of, for messages.

        Raises:
            DamagedCheckpoint: it is not an entry.
        """
        told = _checked(
            told, where, size=_is_count, checksum=_is_digest, rank=_is_count, tensors=_is_mapping, aliases=_is_texts
        )
        tensors = told["tensors"]
        if tensors is not None:
            tensors = {name: _tensor(entry, f"{where}: tensor {name!r}") for name, entry in tensors.items()}
        return cls(told["size"], told["checksum"], told["rank"], tensors, told["aliases"] or {})

    @classmethod
    def told_by_rank(cls, told: Mapping[str, Any]) -> "FileEntry":
        """Return the entry that `to_json` of another rank told in this very save.

        Args:
            told: what it returned.
        """
        tensors = told.get("tensors")
        if tensors is not None:
            tensors = {name: TensorEntry(tuple(entry["shape"]), entry["dtype"]) for name, entry in tensors.items()}
        return cls(told["size"], told["checksum"], told["rank"], tensors, told.get("aliases", {}))


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
    mesh: Mapping[str, int] | None = None
    step: int = 0
    iteration: int = 0
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    versions: Mapping[str, str] = field(default_factory=lambda: library_versions())
    save: str = ""
    format: int = FORMAT

    def to_json(self) -> str:
        """Return the text of the manifest."""
        told = {
            "format": self.format,
            "created": self.created,
            "versions": dict(self.versions),
            "save": self.save,
            "world_size": self.world_size,
            "strategy": self.strategy,
            "mesh": None if self.mesh is None else dict(self.mesh),
            "step": self.step,
            "iteration": self.iteration,
            "checksum": {"algorithm": durable.ALGORITHM, "chunk": durable.CHUNK},
            "files": {name: self.files[name].to_json() for name in sorted(self.files)},
        }
        return laid_out(told) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, origin: str) -> "Manifest":
        """Return the manifest of a text.

        Args:
            text: JSON; nothing in it is trusted.
            origin: where it comes from, for messages.

        Raises:
            DamagedCheckpoint: it is not a manifest, or one of a later format.
        """
        try:
            told = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{origin} is not a manifest: {error}") from None
        try:
            return cls._parsed(told)
        except DamagedCheckpoint as problem:
            raise DamagedCheckpoint(f"{origin} is not a manifest of a checkpoint: {problem}") from None

    @classmethod
    def _parsed(cls, told: Any) -> "Manifest":
        kinds = dict.fromkeys(("format", "world_size", "step", "iteration"), _is_count)
        told = _checked(
            {"world_size": 1, **told} if isinstance(told, dict) else told,
            "",
            **kinds,
            files=_is_mapping,
            mesh=_is_counts,
            versions=_is_texts,
        )
        version, files = told["format"], told["files"]
        expected = {"algorithm": durable.ALGORITHM, "chunk": durable.CHUNK}
        problem = None
        if not version:
            problem = f"format {version} is no number"
        elif version > FORMAT:
            problem = f"format {version} is newer than {FORMAT}, which this version reads; update it"
        elif told.get("checksum") != expected:
            problem = f"checksums are of the kind {_shown(told.get('checksum'))}, not {expected}"
        elif not files:
            problem = "it lists no files"
        elif not told["world_size"]:
            problem = "world_size is 0"
        elif outside := [name for name in files if not is_inside(name)]:
            problem = f"the file name {_shown(outside[0])} leads out of the folder"
        if problem is not None:
            raise DamagedCheckpoint(problem)
        return cls(
            files={name: FileEntry.from_json(entry, name) for name, entry in files.items()},
            world_size=told["world_size"],
            strategy=str(told.get("strategy", "single")),
            mesh=told["mesh"],
            step=told["step"],
            iteration=told["iteration"],
            created=str(told.get("created", "")),
            versions=told["versions"] or {},
            save=str(told.get("save", "")),
            format=version,
        )

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
            raise DamagedCheckpoint(f"{path} is no file, so nobody can read the manifest.")
        try:
            with open(path, "rb") as file:
                data = file.read(_LARGEST + 1)
        except (IsADirectoryError, PermissionError) as error:
            raise DamagedCheckpoint(f"{path} could not be read: {error}") from error
        if len(data) > _LARGEST:
            raise DamagedCheckpoint(f"{path} has more than {_LARGEST} bytes, which no manifest has.")
        return cls.from_json(data, path)

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
    for name in sorted(manifest.files):
        if only is not None and not only(name):
            continue
        entry, path = manifest.files[name], _path(folder, name)
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
        found += _intruders(folder, manifest)
    return found


def _intruders(folder: Path, manifest: Manifest) -> list[str]:
    """Files that a reader would take for parts of the checkpoint, and that somebody else has put there."""
    listed = {name.split("/")[0] for name in manifest.files}
    try:
        entries = sorted(os.listdir(folder))
    except OSError:
        return []
    return [
        f"{entry} is not in the manifest: something else has put it there"
        for entry in entries
        if entry not in listed and names.is_checkpoint_file(entry)
    ]


def _path(folder: Path, name: str) -> str:
    return os.path.join(folder, *name.split("/"))


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

    # Of the package that runs: another distribution of the name may lie beside it.
    version = getattr(sys.modules[__package__.partition(".")[0]], "__version__", "unknown")
    return {
        "accelerate": version,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def is_inside(name: Any) -> bool:
    """Say whether a path of a manifest stays within its folder on every system.

    Args:
        name: what a manifest gives as the path of a file.
    """
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name or name == NAME:
        return False
    if ":" in name and os.name == "nt":
        return False
    return all(part not in ("", ".", "..") and part[1:2] != ":" for part in name.split("/"))


def laid_out(told: Any, depth: int = 0) -> str:
    """Return JSON with a line for each entry of what has entries, so that people and `diff` can read it.

    The encoder of the standard library does that in Python, number by number; this leaves the lines to its faster one.

    Args:
        told: plain data.
        depth: of the first line.
    """
    if not isinstance(told, dict) or dict not in map(type, told.values()):
        return json.dumps(told)
    pad = " " * (depth + 1)
    lines = ",\n".join([f"{pad}{json.dumps(name)}: {laid_out(value, depth + 1)}" for name, value in told.items()])
    return f"{{\n{lines}\n{pad[1:]}}}"


def _tensor(told: Any, where: str) -> TensorEntry:
    # There may be thousands: what is wrong is put into words only where something is.
    if not isinstance(told, dict):
        raise DamagedCheckpoint(f"{where} is no mapping")
    shape, dtype = told.get("shape"), told.get("dtype")
    if not (isinstance(shape, list) and all(map(_is_count, shape))):
        raise DamagedCheckpoint(f"{where} has the shape {_shown(shape)}")
    if not isinstance(dtype, str):
        raise DamagedCheckpoint(f"{where} has the dtype {_shown(dtype)}")
    return TensorEntry(tuple(shape), dtype)


def _checked(told: Any, where: str, **kinds: Callable[[Any], bool]) -> dict[str, Any]:
    """Return a mapping of a manifest whose values are of their kinds; what is not there is None, a count 0."""
    start = f"{where}: " if where else ""
    if not isinstance(told, dict):
        raise DamagedCheckpoint(f"{start}{_shown(told)} is no mapping")
    told = dict(told)
    for key, kind in kinds.items():
        if key not in told and key not in _REQUIRED:
            told[key] = 0 if kind is _is_count else None
        elif not (kind(value := told.get(key)) or (value is None and key in _NULLABLE)):
            raise DamagedCheckpoint(f"{start}{key} {_shown(value)} is no {_KINDS[kind]}")
    return told


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


_REQUIRED, _NULLABLE = ("format", "files", "size", "checksum"), ("mesh", "tensors")
_KINDS = {
    _is_count: "number",
    _is_digest: "32 hexadecimal digits",
    _is_mapping: "mapping",
    _is_counts: "mapping of names and sizes",
    _is_texts: "mapping of names",
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
