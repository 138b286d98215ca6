"""Torch's distributed checkpoint format (DCP): written by torch's planner into durable files, and read by torch's reader.

A folder has ``.distcp`` files, which hold pieces of tensors, and ``.metadata``, a pickle that says which piece lies where. Torch would
run what is in that pickle: here it is read into plain records, compared with the files, and made into torch's objects afterwards.

Files of whole tensors are read through the same class, so that a shard takes its part of them. Reading needs no process group. This
module imports torch's planner, so others import it when they need it.

Source:
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import contextlib
import io
import math
import os
import pickle
import pickletools
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from accelerate.checkpoint import formats
from accelerate.checkpoint.manifest import METADATA, DamagedCheckpoint, FileEntry, is_inside
from accelerate.checkpoint.state import is_spread, mapped_leaves
from accelerate.modules.unwrap import same_tensors
from accelerate.runtime import durable
from accelerate.utils.other import load

Path = str | os.PathLike[str]

# -- reading -----------------------------------------------------------------------------------------------------------


class Stored:
    """A stored state: its structure at once, the values of its tensors when they are asked for. Any rank, alone.

    Args:
        origin: the folder or file, for messages.
        state: the nested state.
        reader: reads the tensors of the state that have a key; None if there is nothing more to read.
        metadata: of the reader.
        aliases: names of tensors that are stored under another name, to that name.

    Attributes:
        state: in a folder of shards, each tensor is a placeholder on the meta device; in files, it is mapped.
        verified: the files have been compared with their checksums, so that they may be read over what is there (`over`).
    """

    verified = False

    def __init__(
        self,
        origin: str,
        state: Any,
        reader: "dcp.StorageReader | _WholeTensors | None" = None,
        metadata: Metadata | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.origin, self.state, self.aliases = origin, state, aliases or {}
        self._reader, self._metadata = reader, metadata
        self._wanted: dict[str, Any] = {}
        self._over: dict[str, list[torch.Tensor]] = {}
        self._reading = threading.Lock()

    @classmethod
    def in_folder(cls, folder: Path, verified: bool = False) -> "Stored":
        """Return what a folder in torch's format holds.

        Args:
            folder: a local folder with a ``.metadata`` file.
            verified: the file has been compared with its checksum.

        Raises:
            DamagedCheckpoint: see `read_metadata`.
        """
        metadata = read_metadata(folder, verified)
        reader = dcp.FileSystemReader(folder)
        reader.set_up_storage_reader(metadata, True)
        stored = cls(os.fspath(folder), None, reader, metadata)
        stored.verified = verified
        values: dict[str, Any] = {}
        for key, spec in metadata.state_dict_metadata.items():
            values[key] = None
            if isinstance(spec, TensorStorageMetadata):
                values[key] = torch.empty(spec.size, dtype=spec.properties.dtype, device="meta")
                values[key].stored_key = key
            else:
                stored._wanted[key] = None
        values.update(stored.fill())
        stored.state = _nested(values, metadata.planner_data or {}, stored.origin)
        return stored

    @classmethod
    def in_files(cls, files: Sequence[Path], aliases: Mapping[str, str] | None = None) -> "Stored":
        """Return what files of whole tensors hold.

        Args:
            files: local files, of safetensors or in torch's format; the state dict of one model if they are several.
            aliases: names that are not in the files, to those that have their values.

        Raises:
            DamagedCheckpoint: a file is not what its name says.
            UnpicklingError: a file holds objects that are not plain data.
        """
        origin = os.fspath(files[0]) if len(files) == 1 else os.path.dirname(os.fspath(files[0]))
        state: dict[Any, Any] = {}
        found: dict[str, str] = {}
        for file in files:
            held = formats.mapped(file)
            if not isinstance(held, Mapping):
                raise DamagedCheckpoint(f"{os.fspath(file)} holds a {type(held).__name__}, not a state dict.")
            if twice := sorted(held.keys() & state.keys(), key=str):
                raise DamagedCheckpoint(f"{origin} has two values of the name {twice[0]!r}.")
            if not os.fspath(file).endswith(".safetensors"):
                found |= same_tensors(held)
            state.update(held)
        found |= {name: kept for name, kept in (aliases or {}).items() if name not in state and kept in state}
        state |= {alias: state[name] for alias, name in found.items()}
        reader = _WholeTensors()
        return cls(origin, mapped_leaves(state, reader.add), reader, Metadata(reader.specs), found)

    def into(self, value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Let `fill` read a tensor of the state into memory, and return that.

        Args:
            value: a tensor of `state` with a ``stored_key``.
            memory: a tensor of its shape, or the shards that this rank has of it (DTensor, ShardedTensor).
        """
        return self._wanted.setdefault(value.stored_key, memory)

    def whole(self, value: Any) -> Any:
        """Return a part of the state in which placeholders are memory that `fill` reads into.

        Args:
            value: a tensor, or nested dictionaries and lists.
        """
        return mapped_leaves(
            value, lambda leaf: self.into(leaf, torch.empty_like(leaf, device="cpu")) if is_placeholder(leaf) else leaf
        )

    def over(self, value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Let `finish` read a tensor of the state over what memory has, and return that.

        Args:
            value: as for `into`.
            memory: as for `into`.
        """
        self._over.setdefault(value.stored_key, []).append(memory)
        return memory

    @torch.no_grad()
    def finish(self) -> None:
        """Read what `over` asked for. Any rank, alone.

        Raises:
            DamagedCheckpoint: as `fill`; some of the memory may have changed then.
        """
        self._wanted = {key: first for key, (first, *_) in self._over.items()}
        self.fill()
        for first, *others in self._over.values():
            for memory in others:  # names of one stored tensor
                memory.copy_(first)
        self._over = {}

    def fill(self) -> dict[str, Any]:
        """Read what `into` and `whole` asked for.

        Raises:
            DamagedCheckpoint: a file does not hold what the metadata says.
        """
        wanted, self._wanted = self._wanted, {}
        if not wanted:
            return {}
        planner = _LoadPlanner(flatten_state_dict=False)
        try:
            with torch.no_grad():
                planner.set_up_planner(wanted, self._metadata, True)
                plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
                self._reader.read_data(plan, planner)
        except Exception as error:  # whatever a damaged file runs into
            raise DamagedCheckpoint(f"{self.origin} could not be read: {error!r}") from error
        return wanted

    def read(self, value: Any) -> Any:
        """Return a part of the state, read. Any thread: torch writes several files in as many threads.

        Args:
            value: as for `whole`.
        """
        with self._reading:
            value = self.whole(value)
            self.fill()
        return value


def is_placeholder(value: Any) -> bool:
    """Say whether a value of a stored state is a tensor that has not been read.

    Args:
        value: anything.
    """
    return isinstance(value, torch.Tensor) and value.is_meta


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Torch's planner, which would run what bytes say."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = load(value, "cpu")


class _WholeTensors:
    """Gives torch's planner parts of tensors that are in memory, or mapped, as its readers do."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.specs: dict[str, Any] = {}

    def add(self, value: Any) -> Any:
        """Give a tensor a key, once; other values stay as they are."""
        if isinstance(value, torch.Tensor) and not hasattr(value, "stored_key"):
            value.stored_key = str(len(self._tensors))
            self._tensors[value.stored_key] = value
            chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
            self.specs[value.stored_key] = TensorStorageMetadata(TensorProperties(value.dtype), value.shape, [chunk])
        return value

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> None:
        for item in plan.items:
            part = self._tensors[item.storage_index.fqn]
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)


class _Inner(dict):
    """A dictionary that torch's planner took apart, unlike one that is a value."""


def _nested(values: Mapping[str, Any], paths: Mapping[str, Sequence[Any]], origin: str) -> Any:
    """Return the nested state that torch's planner took apart; a number in a path is a position in a list."""
    made = _Inner()
    for key, value in values.items():
        steps = paths.get(key, (key,))
        target: Any = made
        for step in steps[:-1]:
            target = target.setdefault(step, _Inner()) if isinstance(target, _Inner) else None
        if not isinstance(target, _Inner) or steps[-1] in target:
            raise DamagedCheckpoint(f"{origin} has values inside of other values: {key}.")
        target[steps[-1]] = value
    return _with_lists(made)


def _with_lists(value: Any) -> Any:
    if not isinstance(value, _Inner):
        return value
    made = {key: _with_lists(child) for key, child in value.items()}
    if made and all(type(key) is int for key in made) and sorted(made) == list(range(len(made))):
        return [made[number] for number in range(len(made))]
    return made


# -- writing -----------------------------------------------------------------------------------------------------------


class _Kept:
    """A dictionary that torch would lose or change: an empty one, and one with keys that are no texts."""

    def __init__(self, value: Mapping[Any, Any]) -> None:
        self.value = value


def _keeping(state: Any, path: str = "") -> Any:
    """Return a state in which such dictionaries are single values."""
    if isinstance(state, list):
        return [_keeping(value, f"{path}.{number}") for number, value in enumerate(state)]
    if not isinstance(state, Mapping):
        return state
    outer = path.count(".") < 2  # what has all weights or states, of which there may be none
    if (state or outer) and all(isinstance(key, str) for key in state):
        return {key: _keeping(value, f"{path}.{key}" if path else key) for key, value in state.items()}

    def refuse_shards(value: Any) -> None:
        if is_spread(value):
            raise ValueError(
                f"{path} has shards of a tensor below a key that is no text, which the sharded format cannot hold. Save with "
                "FULL_STATE_DICT, or use texts as keys."
            )

    mapped_leaves(state, refuse_shards)
    return _Kept(state)


class _SavePlanner(dcp.DefaultSavePlanner):
    """Torch's planner; what ranks have whole is written as the first one has it, and placeholders are read when they are written."""

    def __init__(self, stored: Stored | None) -> None:
        # By default the rank with the least to write writes it; running statistics, say, differ between ranks.
        super().__init__(dedup_save_to_lowest_rank=True)
        self._stored = stored

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        if isinstance(found, _Kept):
            found = found.value
        return found if self._stored is None else self._stored.read(found)


def _writer(folder: Path, rank: int, entries: dict[str, FileEntry], files: int) -> dcp.FileSystemWriter:
    """Return torch's writer, whose files are hashed on their way and on the disk when they are closed; `entries` gets what they are."""

    class DurableFiles(FileSystem):
        """The file system of torch's writer."""

        @contextlib.contextmanager
        def create_stream(self, path: Path, mode: str) -> Iterator[Any]:
            with durable.durable(path) as file:
                yield file
            # The metadata is written aside, and renamed.
            entries[os.path.basename(path).removesuffix(".tmp")] = FileEntry.of(file, rank)

    made = dcp.FileSystemWriter(folder, sync_files=False, thread_count=files)  # a durable file syncs when it is closed
    made.fs = DurableFiles()
    return made


def save(
    state: dict[str, Any],
    folder: Path,
    group: "dist.ProcessGroup | None" = None,
    stored: Stored | None = None,
    files: int = 1,
) -> dict[str, FileEntry]:
    """Write a state in torch's sharded format: each rank the shards it has, and its part of what all have. All ranks.

    Args:
        state: nested dictionaries of tensors, DTensors, ShardedTensors and plain values.
        folder: where to; all ranks see the same. What it had is replaced.
        group: the ranks that save, and how they talk; the default group by default.
        stored: reads the placeholders in the state, one at a time; then one process writes alone.
        files: how many files a rank writes.

    Returns:
        What the manifest says of the files that this rank wrote, by their name in the folder.

    Raises:
        RuntimeError: writing failed on some rank; raised on all of them.
    """
    alone = stored is not None or not (dist.is_available() and dist.is_initialized())
    rank = 0 if alone else dist.get_rank(group)
    entries: dict[str, FileEntry] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(torch.distributed is|Detected an existing checkpoint)")
        try:
            dcp.save(
                _keeping(formats.plain(state)),
                storage_writer=_writer(folder, rank, entries, files),
                planner=_SavePlanner(stored),
                process_group=group,
                no_dist=alone,
            )
        except dcp.CheckpointException as error:
            failures = "; ".join(f"rank {number}: {cause!r}" for number, (cause, _) in sorted(error.failures.items()))
            raise RuntimeError(f"{os.fspath(folder)} could not be written. {failures}") from error
    return entries


# -- metadata ----------------------------------------------------------------------------------------------------------

# No tensor has more bytes; torch counts them in 64 bits.
_LARGEST_SIZE = (1 << 63) - 1
_MOST_DIMS = 64
# A tensor is cut along two dims, by sharding and by tensor parallelism, or along three.
_MOST_CUTS = 8

_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}


class _Record:
    """Stands for an object of one of torch's classes while its pickle is read: it keeps what it is given, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class _Unpickler(pickle.Unpickler):
    """Reads the pickle of a ``.metadata`` file into plain data and records; whatever else it names is refused."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # New ones for each pickle, so that one which meddles with classes spoils only its own.
        self._classes = {
            (module, name): type(name, (_Record,), {}) for module in _RECORDS for name in _RECORDS[module]
        }
        self._classes |= {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): dict}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return self._classes[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in metadata")


def _refuse_traps(data: bytes) -> None:
    """Refuse a pickle that costs more than it holds: memory for places that it only names, or a stack for tuples in tuples."""
    tuples = 0
    for code, argument, _ in pickletools.genops(data):
        if "PUT" in code.name and argument is not None and argument > len(data):
            raise pickle.UnpicklingError(f"it names place {argument} of {len(data)} bytes")
        # A key is hashed, and C's stack has no room for very many tuples in tuples.
        if code.name in ("SETITEM", "SETITEMS", "APPEND", "APPENDS", "BUILD", "REDUCE", "NEWOBJ"):
            tuples = 0
        tuples += code.name.startswith("TUPLE")
        if tuples > 5000:  # a pickle has at most 1,000 items between two of the above
            raise pickle.UnpicklingError("it has more tuples in tuples than metadata has")


def read_metadata(folder: Path, verified: bool = False) -> Metadata:
    """Return what a sharded checkpoint says of its tensors, after comparing that with the files. Any rank, alone.

    No code of the file runs: it is read into plain data, checked, and made into torch's objects afterwards.

    Args:
        folder: a local folder with a ``.metadata`` file.
        verified: the file has been compared with its checksum, so that no damage makes it a trap.

    Raises:
        FileNotFoundError: it has none.
        DamagedCheckpoint: it is not metadata, or a file with tensors is missing or too short.
    """
    path = os.path.join(folder, METADATA)
    with open(path, "rb") as file:
        data = file.read()
    try:
        if not verified:
            _refuse_traps(data)
        return _checked(_Unpickler(data).load(), folder)
    except Exception as error:  # whatever a damaged pickle runs into, or what lies too deep to be shown
        problem = error if isinstance(error, DamagedCheckpoint) else f"{type(error).__name__}: {error}"
        raise DamagedCheckpoint(f"{path} is not the metadata of a checkpoint: {problem}") from None


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise DamagedCheckpoint(problem)


def _kind(value: Any) -> str:
    return type(value).__name__ if isinstance(value, _Record) else ""


def _is_size(value: Any) -> bool:
    counts = isinstance(value, (tuple, list)) and len(value) <= _MOST_DIMS
    return counts and all(type(item) is int and 0 <= item <= _LARGEST_SIZE for item in value)


def _checked(record: Any, folder: Path) -> Metadata:
    _require(_kind(record) == "Metadata", f"it holds {type(record).__name__}")
    values, places, paths = (record.get(name) for name in ("state_dict_metadata", "storage_data", "planner_data"))
    _require(isinstance(values, dict) and isinstance(places, dict), "it has no list of tensors, or of their places")
    _require(paths is None or isinstance(paths, dict), "planner_data is no mapping")
    sizes: dict[str, int] = {}
    storage: dict[MetadataIndex, Any] = {}
    for index, place in places.items():
        name, offset = (index.get("fqn"), index.get("offset")) if _kind(index) == "MetadataIndex" else (None, None)
        _require(isinstance(name, str) and (offset is None or _is_size(offset)), f"{index!r} is no name of a tensor")
        storage[MetadataIndex(name, offset)] = _piece(place, name, folder, sizes)
    ends: dict[str, tuple[int, str]] = {}
    for index, piece in sorted(storage.items(), key=lambda one: (one[1].relative_path, one[1].offset)):
        end, former = ends.get(piece.relative_path, (0, ""))  # of two pieces that share bytes one is wrong
        _require(piece.offset >= end, f"{index.fqn} and {former} lie in one place of {piece.relative_path}")
        ends[piece.relative_path] = max(end, piece.offset + piece.length), index.fqn
    found: dict[str, Any] = {}
    for name, value in values.items():
        _require(isinstance(name, str), f"{name!r} is no name of a tensor")
        if _kind(value) == "BytesStorageMetadata":
            _require(MetadataIndex(name) in storage, f"{name} is in no file")
            found[name] = BytesStorageMetadata()
        else:
            found[name] = _tensor(value, name, storage)
    for name, steps in (paths or {}).items():
        plain = isinstance(steps, (tuple, list)) and all(type(step) in (str, int) for step in steps)
        _require(isinstance(name, str) and plain and len(steps) > 0, f"planner_data of {name!r} is no path")
    return Metadata(found, paths, storage)


def _piece(record: Any, name: str, folder: Path, sizes: dict[str, int]) -> SimpleNamespace:
    """Return where in which file a piece of a tensor lies, as torch's reader asks for it."""
    _require(_kind(record) == "_StorageInfo", f"{name} has no place in a file")
    file, offset, length = (record.get(key) for key in ("relative_path", "offset", "length"))
    _require(is_inside(file), f"the file name {file!r} leads out of the folder")
    _require(_is_size((offset, length)), f"{name} lies at {offset!r}, {length!r} in {file}")
    if file not in sizes:
        path = os.path.join(folder, *file.split("/"))
        _require(os.path.isfile(path), f"{file} is missing")
        sizes[file] = os.stat(path).st_size
    end = offset + length
    _require(end <= sizes[file], f"{file} has {sizes[file]} bytes, but {name} ends at {end}")
    _require(
        not record.get("transform_descriptors"),
        f"{file} is transformed, which is not read here. Save without extensions of the storage writer",
    )
    return SimpleNamespace(relative_path=file, offset=offset, length=length, transform_descriptors=())


def _tensor(record: Any, name: str, storage: Mapping[MetadataIndex, Any]) -> TensorStorageMetadata:
    _require(_kind(record) == "TensorStorageMetadata", f"{name} is neither a tensor nor bytes")
    size, chunks, properties = record.get("size"), record.get("chunks"), record.get("properties")
    _require(_is_size(size) and isinstance(chunks, list), f"{name} has the shape {size!r}")
    # Its class writes a tuple, an older version wrote a dictionary.
    state = properties.state if _kind(properties) == "TensorProperties" else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    _require(isinstance(dtype, torch.dtype), f"{name} has the dtype {dtype!r}")
    _require(math.prod(size) * dtype.itemsize <= _LARGEST_SIZE, f"{name} has the shape {tuple(size)}")
    pieces: dict[tuple[Any, ...], ChunkStorageMetadata] = {}
    for chunk in chunks:
        is_chunk = _kind(chunk) == "ChunkStorageMetadata"
        offsets, lengths = (chunk.get("offsets"), chunk.get("sizes")) if is_chunk else (None, None)
        fits = _is_size(offsets) and _is_size(lengths) and len(offsets) == len(lengths) == len(size)
        fits = fits and all(start + count <= whole for start, count, whole in zip(offsets, lengths, size, strict=True))
        _require(fits, f"{name} of shape {tuple(size)} has a piece at {offsets!r} of shape {lengths!r}")
        place = storage.get(MetadataIndex(name, torch.Size(offsets)))
        _require(place is not None, f"the piece of {name} at {tuple(offsets)} is in no file")
        count = math.prod(lengths)
        # Memory is allocated for what metadata says, so it must not say more than there is.
        holds = count * dtype.itemsize <= place.length
        _require(holds, f"{name} has {count} elements of {dtype} in {place.length} bytes")
        piece = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
        pieces[piece.offsets, piece.sizes] = piece  # ranks that have the same may both list it
    problem = _uncovered(size, list(pieces))
    _require(problem is None, f"{name} of shape {tuple(size)} is not whole: {problem}")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), list(pieces.values()))


def _uncovered(size: Sequence[int], pieces: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Say what keeps pieces from being all of a tensor, each part of it once; None if nothing does.

    Boxes fill a larger box exactly if their corners are its corners: each corner counts 1 or -1, in turn from one end of an edge
    to the other, and all but the corners of the whole come to 0.
    """
    elements = sum(math.prod(lengths) for _, lengths in pieces)
    if elements != math.prod(size):
        return f"of its {math.prod(size)} elements {elements} are in the files"
    pieces = [(offsets, lengths) for offsets, lengths in pieces if math.prod(lengths)]
    cut = [dim for dim, whole in enumerate(size) if any(lengths[dim] != whole for _, lengths in pieces)]
    if len(cut) > _MOST_CUTS:
        return f"it is cut along {len(cut)} dims"
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (offsets, lengths) in ((-1, ([0] * len(size), size)), *((1, piece) for piece in pieces)):
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[dim] + end * lengths[dim] for dim, end in zip(cut, ends, strict=True))
            corners[corner] += -sign if sum(ends) % 2 else sign
    return "its pieces overlap, and leave a hole" if math.prod(size) and any(corners.values()) else None
