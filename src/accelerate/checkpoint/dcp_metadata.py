"""The metadata of torch's distributed checkpoints, read without trust.

``.metadata`` is a pickle. Torch unpickles it, which runs whatever code it names. Here it is read into plain records, which are
compared with each other and with the files, and made into torch's objects afterwards.

Source:
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import io
import math
import os
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accelerate.checkpoint.manifest import DamagedCheckpoint, is_inside
from accelerate.checkpoint.names import METADATA

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

Path = str | os.PathLike[str]

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


_MODULE = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_MODULE, "Metadata"),
    (_MODULE, "TensorStorageMetadata"),
    (_MODULE, "BytesStorageMetadata"),
    (_MODULE, "ChunkStorageMetadata"),
    (_MODULE, "TensorProperties"),
    (_MODULE, "MetadataIndex"),
    (_MODULE, "StorageMeta"),
    (_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(("pathlib", name) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
}


# Tuples that lie in tuples: metadata has three levels. What is a key is hashed, and C's stack has no room for very many.
_DEEPEST = 8


def _size(items: Any = ()) -> tuple[int, ...]:
    """Stands for `torch.Size`."""
    if type(items) not in (tuple, list) or not all(type(item) is int for item in items):
        raise pickle.UnpicklingError("it has a size that is no list of numbers")
    return tuple(items)


# The Unpickler in C allocates memory for any index that a pickle names; the one in Python does not.
class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Reads the pickle of a ``.metadata`` file into plain data and records; whatever else it names is refused."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # New ones for each pickle, so that one which meddles with classes spoils only its own.
        self._classes = {key: type(key[1], (_Record,), {}) for key in _RECORDS}
        self._depths: dict[int, tuple[int, Any]] = {}

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

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")

    def note(self, made: tuple[Any, ...]) -> None:
        """Refuse a tuple that has too many levels of tuples in it."""
        depths = [self._depths.get(id(item), (1, None))[0] for item in made if type(item) is tuple]
        if depths:
            self._depths[id(made)] = max(depths) + 1, made  # with it, so that its id stays its own
            if max(depths) >= _DEEPEST:
                raise pickle.UnpicklingError("it has more tuples in tuples than metadata has")

    @staticmethod
    def _noting(load: Callable[[Any], None]) -> Callable[["_Unpickler"], None]:
        def load_tuple(self: "_Unpickler") -> None:
            load(self)
            self.note(self.stack[-1])

        return load_tuple

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]
    for _code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
        dispatch[_code[0]] = _noting(dispatch[_code[0]])


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
    storage: dict[MetadataIndex, Place] = {}
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


class Place:
    """Where in which file a piece lies."""

    def __init__(self, file: str, offset: int, length: int) -> None:
        self.file, self.offset, self.length = file, offset, length


def _place(told: Any, name: str, folder: Path, sizes: dict[str, int]) -> Place:
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
    return Place(file, offset, length)


def _require_distinct(storage: Mapping["MetadataIndex", Place]) -> None:
    """Refuse pieces that share bytes: one of them has the values of another."""
    ends: dict[str, tuple[int, str]] = {}
    for index, place in sorted(storage.items(), key=lambda one: (one[1].file, one[1].offset)):
        end, former = ends.get(place.file, (0, ""))
        _require(place.offset >= end, f"{index.fqn} and {former} lie in one place of {place.file}")
        ends[place.file] = max(end, place.offset + place.length), index.fqn


def _tensor(told: Any, name: str, storage: Mapping["MetadataIndex", Place]) -> "TensorStorageMetadata":
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
