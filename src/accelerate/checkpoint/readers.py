"""Readers of what is stored in a checkpoint: any part of any value, from torch's sharded format or from files of whole tensors.

Torch's planner finds the pieces that a rank needs for its shard, whatever shards were written. Reading needs no process group: each
rank reads what it needs, alone, and nothing of the model changes.

The sharded format's ``.metadata`` is a pickle, and torch would run what is in it: here it is read into plain records, compared with the
files, and made into torch's objects afterwards.

Source:
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import contextlib
import io
import math
import os
import pickle
import pickletools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from accelerate.checkpoint import formats
from accelerate.checkpoint.dcp import Path, Position, Steps, leaves
from accelerate.checkpoint.manifest import DamagedCheckpoint, is_inside
from accelerate.checkpoint.names import METADATA
from accelerate.modules.tensors import same_tensors
from accelerate.utils.other import load

if TYPE_CHECKING:
    from torch.distributed.checkpoint import LoadPlan, LoadPlanner
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata


class Reader:
    """What is stored under which name, and pieces of it. Any rank, alone.

    Attributes:
        origin: the folder or file, for messages.
        metadata: what torch's planner is told: shapes, dtypes, and which pieces there are.
        aliases: names of tensors that are stored under another one, to that one.
    """

    origin: str
    metadata: "Metadata"
    aliases: Mapping[str, str] = {}

    def specs(self) -> Iterator[tuple[Steps, str]]:
        """Yield where each value belongs within the saved state, and its key in the metadata."""
        paths = self.metadata.planner_data or {}
        for key in self.metadata.state_dict_metadata:
            yield tuple(paths.get(key, (key,))), key

    def _piece(self, index: "MetadataIndex") -> torch.Tensor:
        raise NotImplementedError

    def _bytes(self, index: "MetadataIndex") -> io.BytesIO:
        raise NotImplementedError

    def _order(self, index: "MetadataIndex") -> tuple[Any, ...]:
        return (index.fqn,)

    def read_data(self, plan: "LoadPlan", planner: "LoadPlanner") -> None:
        """Give a planner the pieces that its plan asks for.

        Args:
            plan: what is read.
            planner: where it goes.
        """
        from torch.distributed.checkpoint.planner import LoadItemType

        last, piece = None, None
        for item in sorted(plan.items, key=lambda item: self._order(item.storage_index)):
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._bytes(item.storage_index))
                continue
            if last != item.storage_index:
                piece = None  # so that there are never two
                last, piece = item.storage_index, self._piece(item.storage_index)
            part = piece
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)

    def part(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a part of a tensor. Any rank, alone.

        Args:
            key: of a tensor in the metadata.
            offsets: where the part begins.
            sizes: its shape.

        Raises:
            DamagedCheckpoint: a file does not hold what the metadata says.
        """
        from torch.distributed.checkpoint import LoadPlan
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        spec = self.metadata.state_dict_metadata[key]
        made = torch.empty(sizes, dtype=spec.properties.dtype)
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        with self._telling():
            self.read_data(LoadPlan(create_read_items_for_chunk_list(key, spec, [chunk])), _Into(made))
        return made

    def whole(self, keys: Iterable[str]) -> dict[str, Any]:
        """Read whole values into new memory. Any rank, alone.

        Args:
            keys: of the metadata.

        Raises:
            DamagedCheckpoint: a file does not hold what the metadata says.
        """
        specs = self.metadata.state_dict_metadata
        return self.fill({key: memory_of(specs[key]) for key in keys})

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Say which checkpoint it is that cannot be read."""
        try:
            with torch.no_grad():
                yield
        except DamagedCheckpoint:
            raise
        except Exception as error:  # whatever a damaged file runs into
            raise DamagedCheckpoint(f"{self.origin} could not be read: {error!r}") from error

    def fill(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Read values, and return what was asked for with them in it. Any rank, alone.

        Args:
            wanted: keys of the metadata, and for each tensor memory of its shape: a tensor, or the shards that this rank
                has of it (DTensor, ShardedTensor). For other values anything.

        Raises:
            DamagedCheckpoint: a file does not hold what the metadata says.
        """
        planner = _planner()
        planner.set_up_planner(wanted, self.metadata, True)
        plan = planner.create_global_plan([planner.create_local_plan()])[0]
        with self._telling():
            self.read_data(planner.finish_plan(plan), planner)
        return wanted


def memory_of(spec: Any) -> torch.Tensor | None:
    """Return memory for a whole value; None if it is no tensor.

    Args:
        spec: what the metadata says of it.
    """
    return torch.empty(spec.size, dtype=spec.properties.dtype) if hasattr(spec, "size") else None


def _planner() -> "LoadPlanner":
    from torch.distributed.checkpoint import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):
        """torch's planner, which would run what bytes say."""

        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            self.original_state_dict[read_item.dest_index.fqn] = load(value, "cpu")

    return Planner(flatten_state_dict=False)


class _Into:
    """The part of a planner that tells where what is read goes: into one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def resolve_tensor(self, item: Any) -> torch.Tensor:
        target = self._tensor
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, item: Any, tensor: torch.Tensor) -> None:
        """Do nothing more."""


class FolderReader(Reader):
    """A folder in torch's sharded format.

    Args:
        folder: a local folder with a ``.metadata`` file.

    Raises:
        DamagedCheckpoint: see `read_metadata`.
    """

    def __init__(self, folder: Path) -> None:
        self.origin = os.fspath(folder)
        self.metadata = read_metadata(folder)

    def specs(self) -> Iterator[tuple[Steps, str]]:
        """Yield where each value belongs within the saved state, and its key in the metadata."""
        for steps, key in super().specs():  # torch makes the keys of dictionaries texts
            yield tuple(Position(step) if type(step) is int else step for step in steps), key

    def _order(self, index: "MetadataIndex") -> tuple[Any, ...]:
        place = self.metadata.storage_data[index]
        return place.file, place.offset

    def _open(self, index: "MetadataIndex") -> "FileSlice":
        place = self.metadata.storage_data[index]
        return FileSlice(os.path.join(self.origin, *place.file.split("/")), place.offset, place.length)

    def _piece(self, index: "MetadataIndex") -> torch.Tensor:
        with self._open(index) as stream:
            value = load(stream, "cpu")
        spec = self.metadata.state_dict_metadata[index.fqn]
        sizes = next(chunk.sizes for chunk in spec.chunks if chunk.offsets == index.offset)
        plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not plain or value.shape != sizes or value.dtype != spec.properties.dtype:
            held = f"{value.dtype} of shape {tuple(value.shape)}" if plain else type(value).__name__
            expected = f"{spec.properties.dtype} of shape {tuple(sizes)}"
            raise DamagedCheckpoint(f"{self.origin} holds {held} for {index.fqn}, but {expected} was written.")
        return value

    def _bytes(self, index: "MetadataIndex") -> io.BytesIO:
        with self._open(index) as stream:
            return io.BytesIO(stream.read())


class FileSlice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, path: str, start: int, length: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed with this object
        self._start, self._length, self._at = start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        filled = 0
        while filled < len(view):  # the caller takes a short read for the end
            count = self._file.readinto(view[filled:])
            if not count:
                break
            filled += count
        self._at += filled
        return filled

    def close(self) -> None:
        self._file.close()
        super().close()


class FilesReader(Reader):
    """Whole tensors in files of safetensors, or in one of torch's format; only the parts asked for are read.

    Args:
        files: local files; more than one only for safetensors.
        aliases: names that are not in the files, to those that have their values.

    Raises:
        DamagedCheckpoint: a file is not what its name says.
        UnpicklingError: it holds objects that are not plain data.
    """

    def __init__(self, files: Sequence[Path], aliases: Mapping[str, str] | None = None) -> None:
        self.origin = os.fspath(files[0]) if len(files) == 1 else os.path.dirname(os.fspath(files[0]))
        self._values: dict[str, Any] = {}
        paths: dict[str, Steps] = {}
        found: dict[str, str] = {}
        for file in files:
            held = formats.mapped(file)
            if not isinstance(held, Mapping):
                raise DamagedCheckpoint(f"{os.fspath(file)} holds a {type(held).__name__}, not a state dict.")
            if not os.fspath(file).endswith(".safetensors"):
                found |= same_tensors(held)
            for steps, value in leaves(held):
                key = ".".join(map(str, steps))
                if key in self._values:  # of a number and of a text, or of two files
                    raise DamagedCheckpoint(f"{self.origin} has two values of the name {key!r}.")
                self._values[key], paths[key] = value, steps
        found |= {
            name: kept for name, kept in (aliases or {}).items() if name not in self._values and kept in self._values
        }
        self.aliases = found
        self._values |= {alias: self._values[name] for alias, name in found.items()}
        self.metadata = _whole(self._values, paths)

    def _piece(self, index: "MetadataIndex") -> torch.Tensor:
        return self._values[index.fqn]

    def fill(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Read values, and return what was asked for with them in it. Any rank, alone.

        Args:
            wanted: as for every reader.
        """
        objects = {key: self._values[key] for key in wanted if not isinstance(self._values[key], torch.Tensor)}
        return {**super().fill({key: wanted[key] for key in wanted if key not in objects}), **objects}


def _whole(values: Mapping[str, Any], paths: dict[str, Steps]) -> "Metadata":
    """Return the metadata of tensors that are in one piece each."""
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    told: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
            told[name] = TensorStorageMetadata(TensorProperties(value.dtype, value.layout), value.shape, [chunk])
        else:
            told[name] = BytesStorageMetadata()
    return Metadata(told, paths)


# -- metadata ----------------------------------------------------------------------------------------------------------

# Metadata has a few hundred bytes per piece of a tensor; a file beyond this is something else, and is not parsed.
_LARGEST_METADATA = 1 << 30

# No tensor has more bytes; torch counts them in 64 bits.
_LARGEST_SIZE = (1 << 63) - 1
_MOST_DIMS = 64
# A tensor is cut along two dims, by sharding and by tensor parallelism, or along three.
_MOST_CUTS = 8


class _Record:
    """Stands for an object of one of torch's classes while its pickle is read: it keeps what it is given, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        return self.state.get(name, default) if isinstance(self.state, dict) else default


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
# A key is hashed, and C's stack has no room for very many tuples in tuples; a pickle has at most 1,000 items between two of these.
_MOST_TUPLES = 5000
_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
_BETWEEN = ("SETITEM", "SETITEMS", "APPEND", "APPENDS", "BUILD", "REDUCE", "NEWOBJ")


def _size(items: Any = ()) -> tuple[int, ...]:
    """Stands for `torch.Size`."""
    if type(items) not in (tuple, list) or not all(type(item) is int for item in items):
        raise pickle.UnpicklingError("it has a size that is no list of numbers")
    return tuple(items)


class _Unpickler(pickle.Unpickler):
    """Reads the pickle of a ``.metadata`` file into plain data and records; whatever else it names is refused."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # New ones for each pickle, so that one which meddles with classes spoils only its own.
        self._classes = {
            (module, name): type(name, (_Record,), {}) for module in _RECORDS for name in _RECORDS[module]
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return self._classes[module, name]
        if (module, name) == ("torch", "Size"):
            return _size
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in metadata")


def _refuse_traps(data: bytes) -> None:
    """Refuse a pickle that costs more than it holds: memory for places that it only names, or a stack for tuples in tuples."""
    tuples = 0
    for code, argument, _ in pickletools.genops(data):
        if "PUT" in code.name and argument is not None and argument > len(data):
            raise pickle.UnpicklingError(f"it names place {argument} of {len(data)} bytes")
        tuples = 0 if code.name in _BETWEEN else tuples + (code.name in _TUPLES)
        if tuples > _MOST_TUPLES:
            raise pickle.UnpicklingError("it has more tuples in tuples than metadata has")


def read_metadata(folder: Path) -> "Metadata":
    """Return what a sharded checkpoint says of its tensors, after comparing that with the files. Any rank, alone.

    No code of the file runs: it is read into plain data, checked, and made into torch's objects afterwards.

    Args:
        folder: a local folder with a ``.metadata`` file.

    Raises:
        FileNotFoundError: it has none.
        DamagedCheckpoint: it is not metadata, or a file with tensors is missing or too short.
    """
    path = os.path.join(folder, METADATA)
    with open(path, "rb") as file:
        data = file.read(_LARGEST_METADATA + 1)
    if len(data) > _LARGEST_METADATA:
        raise DamagedCheckpoint(f"{path} has more than {_LARGEST_METADATA} bytes, which no metadata has.")
    try:
        _refuse_traps(data)
        told = _Unpickler(data).load()
    except Exception as error:  # whatever a damaged pickle runs into
        raise DamagedCheckpoint(
            f"{path} is not the metadata of a checkpoint: {error or type(error).__name__}"
        ) from None
    try:
        return _checked(told, folder)
    except DamagedCheckpoint as problem:
        raise DamagedCheckpoint(f"{path} is damaged: {problem}") from None
    except (RecursionError, OverflowError, ValueError) as error:  # what lies too deep, or is too large, to be told
        raise DamagedCheckpoint(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise DamagedCheckpoint(problem)


def _kind(value: Any) -> str:
    return type(value).__name__ if isinstance(value, _Record) else ""


def _is_size(value: Any) -> bool:
    counts = isinstance(value, (tuple, list)) and len(value) <= _MOST_DIMS
    return counts and all(type(item) is int and 0 <= item <= _LARGEST_SIZE for item in value)


def _checked(told: Any, folder: Path) -> "Metadata":
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

    _require(_kind(told) == "Metadata", f"it holds {type(told).__name__}")
    values, places, paths = (told.get(name) for name in ("state_dict_metadata", "storage_data", "planner_data"))
    _require(isinstance(values, dict) and isinstance(places, dict), "it has no list of tensors, or of their places")
    _require(paths is None or isinstance(paths, dict), "planner_data is no mapping")

    sizes: dict[str, int] = {}
    storage: dict[MetadataIndex, Slice] = {}
    for index, place in places.items():
        name, offset = (index.get("fqn"), index.get("offset")) if _kind(index) == "MetadataIndex" else (None, None)
        _require(isinstance(name, str) and (offset is None or _is_size(offset)), f"{index!r} is no name of a tensor")
        storage[MetadataIndex(name, offset)] = _place(place, name, folder, sizes)
    _require_distinct(storage)
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
    return Metadata(found, None if paths is None else {name: tuple(steps) for name, steps in paths.items()}, storage)


class Slice:
    """Where in which file a piece lies."""

    def __init__(self, file: str, offset: int, length: int) -> None:
        self.file, self.offset, self.length = file, offset, length


def _place(told: Any, name: str, folder: Path, sizes: dict[str, int]) -> Slice:
    _require(_kind(told) == "_StorageInfo", f"{name} has no place in a file")
    file, offset, length = (told.get(key) for key in ("relative_path", "offset", "length"))
    _require(is_inside(file), f"the file name {file!r} leads out of the folder")
    _require(_is_size((offset, length)), f"{name} lies at {offset!r}, {length!r} in {file}")
    transforms = told.get("transform_descriptors") or ()
    _require(
        isinstance(transforms, (list, tuple)) and all(isinstance(item, str) for item in transforms),
        f"the transforms of {name} are no names",
    )
    if file not in sizes:
        path = os.path.join(folder, *file.split("/"))
        _require(os.path.isfile(path), f"{file} is missing")
        sizes[file] = os.stat(path).st_size
    end = offset + length
    _require(end <= sizes[file], f"{file} has {sizes[file]} bytes, but {name} ends at {end}")
    _require(
        not transforms,
        f"{file} is transformed by {', '.join(transforms)}, which is not read here. Save without extensions of the storage "
        "writer",
    )
    return Slice(file, offset, length)


def _require_distinct(storage: Mapping["MetadataIndex", Slice]) -> None:
    """Refuse pieces that share bytes: one of them has the values of another."""
    ends: dict[str, tuple[int, str]] = {}
    for index, place in sorted(storage.items(), key=lambda one: (one[1].file, one[1].offset)):
        end, former = ends.get(place.file, (0, ""))
        _require(place.offset >= end, f"{index.fqn} and {former} lie in one place of {place.file}")
        ends[place.file] = max(end, place.offset + place.length), index.fqn


def _tensor(told: Any, name: str, storage: Mapping["MetadataIndex", Slice]) -> "TensorStorageMetadata":
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    _require(_kind(told) == "TensorStorageMetadata", f"{name} is neither a tensor nor bytes")
    size, chunks, properties = told.get("size"), told.get("chunks"), told.get("properties")
    _require(_is_size(size) and isinstance(chunks, list), f"{name} has the shape {size!r}")
    # Its class writes a tuple, an older version wrote a dictionary.
    state = properties.state if _kind(properties) == "TensorProperties" else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    _require(isinstance(dtype, torch.dtype), f"{name} has the dtype {dtype!r}")
    _require(math.prod(size) * dtype.itemsize <= _LARGEST_SIZE, f"{name} has the shape {tuple(size)}")
    pieces: dict[tuple[Any, ...], ChunkStorageMetadata] = {}
    for chunk in chunks:
        offsets, lengths = (
            (chunk.get("offsets"), chunk.get("sizes")) if _kind(chunk) == "ChunkStorageMetadata" else (0, 0)
        )
        fits = _is_size(offsets) and _is_size(lengths) and len(offsets) == len(lengths) == len(size)
        fits = fits and all(start + count <= whole for start, count, whole in zip(offsets, lengths, size, strict=True))
        _require(fits, f"{name} of shape {tuple(size)} has a piece at {offsets!r} of shape {lengths!r}")
        place = storage.get(MetadataIndex(name, torch.Size(offsets)))
        _require(place is not None, f"the piece of {name} at {tuple(offsets)} is in no file")
        count = math.prod(lengths)
        # Memory is allocated for what metadata tells, so it must not tell of more than there is.
        _require(
            count * dtype.itemsize <= place.length, f"{name} has {count} elements of {dtype} in {place.length} bytes"
        )
        piece = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
        pieces[piece.offsets, piece.sizes] = piece  # ranks that have the same may both tell of it
    problem = _uncovered(size, list(pieces))
    _require(problem is None, f"{name} of shape {tuple(size)} is not whole: {problem}")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), list(pieces.values()))


def _uncovered(size: Sequence[int], pieces: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Say what keeps pieces from being all of a tensor, each part of it once; None if nothing does.

    Boxes fill a larger box exactly if their corners are its corners: each corner counts 1 or -1, in turn from one end of an edge
    to the other, and all but the corners of the whole come to 0.

    Args:
        size: of the tensor.
        pieces: where each begins, and its shape; each lies within the tensor.
    """
    elements = sum(math.prod(lengths) for _, lengths in pieces)
    if elements != math.prod(size):
        return f"of its {math.prod(size)} elements {elements} are in the files"
    pieces = [(offsets, lengths) for offsets, lengths in pieces if math.prod(lengths)]
    cut = [dim for dim, whole in enumerate(size) if any(lengths[dim] != whole for _, lengths in pieces)]
    if len(cut) > _MOST_CUTS:
        return f"it is cut along {len(cut)} dims"
    corners: Counter[tuple[int, ...]] = Counter()
    whole_one = ([0] * len(size), size)
    for sign, (offsets, lengths) in ((-1, whole_one), *((1, piece) for piece in pieces)):
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[dim] + end * lengths[dim] for dim, end in zip(cut, ends, strict=True))
            corners[corner] += -sign if sum(ends) % 2 else sign
    return "its pieces overlap, and leave a hole" if math.prod(size) and any(corners.values()) else None
