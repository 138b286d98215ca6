"""Reading a model or an optimizer of any layout: its structure at once, the values of its tensors when they are asked for.

`CheckpointReader` gives torch's planner, which knows the parts of a tensor that this rank has, one of three sources:

- full: files of whole tensors, mapped (`WholeTensors`);
- sharded: a folder in torch's distributed format (DCP), read by torch's reader. It has ``.distcp`` files, which hold pieces of tensors, and
  ``.metadata``, a pickle that says which piece lies where. Torch would run what is in that pickle: here it may name torch's records only,
  and is compared with the files;
- zero: what each rank of DeepSpeed wrote (`checkpoint.zero`), joined from pieces of flat tensors (`WholeTensors`).

Reading needs no process group. This module imports torch's planner, so others import it when they need it.

Source:
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import contextlib
import io
import itertools
import math
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from accelerate.checkpoint.load import CheckpointFolder, copy_over
from accelerate.checkpoint.manifest import METADATA, DamagedCheckpoint
from accelerate.checkpoint.state import like, mapped_leaves, part
from accelerate.runtime import durable
from accelerate.runtime.torch_private import StorageInfo, unflatten_state_dict
from accelerate.utils.other import load_each

# So many files are held open until their tensors are read; of more the tensors are read at once, into more memory.
_HELD = 256


@dataclass(eq=False)
class CheckpointReader:
    """A stored state: its structure at once, the values of its tensors when they are asked for. Any rank, alone.

    Attributes:
        origin: the folder or file, for messages.
        state: nested; in a folder of shards, each tensor is a placeholder on the meta device; in files, it is mapped.
        reader: reads the tensors of the state that have a key; None if there is nothing more to read.
        aliases: names of tensors that are stored under another name, to that name.
        folder: compares what is read of shards with its digests; None where there are none.
    """

    origin: str
    state: Any
    reader: "dcp.StorageReader | WholeTensors | None" = None
    metadata: Metadata | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    folder: CheckpointFolder | None = None
    _wanted: dict[str, Any] = field(default_factory=dict)
    _over: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _later: tuple[dcp.LoadPlan, dcp.LoadPlanner] | None = None
    _early: dict[str, Any] = field(default_factory=dict)
    _reading: Any = field(default_factory=threading.Lock)

    @classmethod
    def in_folder(cls, path: durable.Path, folder: CheckpointFolder | None = None) -> "CheckpointReader":
        """Return what a local folder in torch's format holds; DamagedCheckpoint as `read_metadata`."""
        if folder is not None:
            folder.check_file(METADATA)
        metadata = read_metadata(path, folder)
        reader = dcp.FileSystemReader(path)
        reader.fs = _HeldFiles()
        reader.set_up_storage_reader(metadata, True)
        stored = cls(os.fspath(path), None, reader, metadata, folder=folder)
        with _damage_named(stored.origin):
            values, paths = {}, {}
            for key, spec in metadata.state_dict_metadata.items():
                paths[key] = metadata.planner_data.get(key, (key,))
                values[key] = None
                if isinstance(spec, TensorStorageMetadata):
                    values[key] = torch.empty(spec.size, dtype=spec.properties.dtype, device="meta")
                    values[key].stored_key = key
                else:
                    stored._wanted[key] = None
            values.update(stored.fill())
            stored.state = unflatten_state_dict(values, paths)
        return stored

    @classmethod
    def in_files(cls, origin: str, state: Mapping[str, Any], aliases: Mapping[str, str]) -> "CheckpointReader":
        """Return what files of whole tensors hold, as `layouts.merged` returns it."""
        reader = WholeTensors()
        return cls(origin, mapped_leaves(state, reader.add), reader, Metadata(reader.specs), aliases)

    def into(self, value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Let `fill` read a tensor of the state into memory, plain or this rank's shards, and return that."""
        return self._wanted.setdefault(value.stored_key, memory)

    def whole(self, value: Any) -> Any:
        """Return a part of the state, of any nesting, in which placeholders are memory that `fill` reads into."""

        def in_memory(leaf: Any) -> Any:
            is_placeholder = isinstance(leaf, torch.Tensor) and leaf.is_meta
            return self.into(leaf, torch.empty_like(leaf, device="cpu")) if is_placeholder else leaf

        return mapped_leaves(value, in_memory)

    def over(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Let `finish` read tensors of the state over what memory has: pairs of a tensor and memory."""
        for value, memory in pairs:
            self._over.setdefault(value.stored_key, []).append(memory)

    def finish(self) -> None:
        """Read what `over` asked for; where it raises DamagedCheckpoint, some of the memory may have changed."""
        if self._later is not None:
            with _damage_named(self.origin), torch.no_grad():
                self.reader.read_data(*self._later)
        with torch.no_grad():
            for key, (first, *others) in self._over.items():
                if key in self._early:
                    part(first).copy_(part(self._early[key]))
                for memory in others:  # names of one stored tensor
                    memory.copy_(first)
        self._over, self._later, self._early = {}, None, {}

    def fill(self) -> dict[str, Any]:
        """Read what `into` and `whole` asked for; DamagedCheckpoint if a file does not hold what the metadata says.

        The files that `finish` reads are opened: what takes their place meanwhile is of another save.
        """
        wanted, self._wanted = self._wanted, {}
        if wanted:
            plan, planner, _ = self._planned(wanted)
            with _damage_named(self.origin), torch.no_grad():
                self.reader.read_data(plan, planner)
                planner.load_objects()
        if self._over:
            firsts = {key: first for key, (first, *_) in self._over.items()}
            plan, planner, files = self._planned(firsts)
            self._later = plan, planner
            with _damage_named(self.origin), torch.no_grad():
                if len(files) <= _HELD:
                    for file in files:
                        self.reader.fs.hold(os.path.join(self.origin, file))
                else:
                    self._early, self._later = {key: like(first) for key, first in firsts.items()}, None
                    plan, planner, _ = self._planned(self._early)
                    self.reader.read_data(plan, planner)
        return wanted

    def _planned(self, wanted: dict[str, Any]) -> tuple[dcp.LoadPlan, "_LoadPlanner", list[str]]:
        """Return what torch reads for values, and of which files, if it does; their pieces have been compared with their digests."""
        planner = _LoadPlanner()
        ranges: dict[str, set[tuple[int, int]]] = {}
        with _damage_named(self.origin), torch.no_grad():
            planner.set_up_planner(wanted, self.metadata, True)
            plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
            for item in plan.items if self.metadata.storage_data else ():
                place = self.metadata.storage_data[item.storage_index]
                ranges.setdefault(place.relative_path, set()).add((place.offset, place.offset + place.length))
        if self.folder is not None:
            self.folder.check(ranges)
        return plan, planner, list(ranges)

    def read_flat(self, value: torch.Tensor, start: int, count: int) -> torch.Tensor:
        """Return some elements of a tensor of the state, read; of one that ranks have parts of, no more is read."""
        if isinstance(self.reader, WholeTensors) and hasattr(value, "stored_key"):
            return self.reader.flat(value.stored_key, start, start + count)
        return self.read(value).flatten()[start : start + count]

    def read(self, value: Any) -> Any:
        """Return a part of the state, read. Any thread: torch writes several files in as many threads."""
        with self._reading:
            value = self.whole(value)
            self.fill()
        return value


@contextlib.contextmanager
def _damage_named(origin: str) -> Iterator[None]:
    """Turn whatever damaged bytes run into within the block into one error."""
    try:
        yield
    except DamagedCheckpoint:
        raise
    except Exception as error:
        raise DamagedCheckpoint(f"{origin} could not be read: {error!r}") from error


class _HeldFiles(FileSystem):
    """The file system of torch's reader; it reads files that are held as they were, whatever is at their path by now."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    def hold(self, path: str) -> None:
        """Open a file, until this object goes."""
        self._held[path] = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._held[path])

    @contextlib.contextmanager
    def create_stream(self, path: durable.Path, mode: str) -> Iterator[Any]:
        with open(self._held.get(os.fspath(path), path), mode, closefd=os.fspath(path) not in self._held) as file:
            yield file


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Torch's planner, which would run what bytes say."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self._bytes: dict[str, io.BytesIO] = {}

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self._bytes[read_item.dest_index.fqn] = value

    def load_objects(self) -> None:
        """Put the objects where the values belong whose bytes have been read."""
        if self._bytes:
            self.original_state_dict.update(zip(self._bytes, load_each(self._bytes.values(), "cpu"), strict=True))


class WholeTensors:
    """Gives torch's planner parts of tensors that are in memory, mapped, or joined when they are read, as its readers do."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor | Callable[[int, int], torch.Tensor]] = {}
        self.specs: dict[str, Any] = {}

    def join(self, read: Callable[[int, int], torch.Tensor], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a placeholder for a tensor of which `read` returns the elements from one number to another, flat."""
        return self.add(torch.empty(shape, dtype=dtype, device="meta"), read)

    def add(self, value: Any, read: Callable[[int, int], torch.Tensor] | None = None) -> Any:
        """Give a tensor a key, once; other values stay as they are."""
        if isinstance(value, torch.Tensor) and not hasattr(value, "stored_key"):
            value.stored_key = str(len(self._tensors))
            self._tensors[value.stored_key] = read or value
            chunk = dcp.metadata.ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
            self.specs[value.stored_key] = TensorStorageMetadata(TensorProperties(value.dtype), value.shape, [chunk])
        return value

    def flat(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return the elements of a tensor from one number to another."""
        held = self._tensors[key]
        return held.flatten()[start:stop] if isinstance(held, torch.Tensor) else held(start, stop)

    def _part(self, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        held, shape = self._tensors[key], self.specs[key].size
        if isinstance(held, torch.Tensor):
            found = held
        elif list(lengths[1:]) == list(shape[1:]):  # rows, of which no more is joined
            row = math.prod(shape[1:])
            start = offsets[0] * row if shape else 0
            return held(start, start + math.prod(lengths)).view(lengths)
        else:
            found = held(0, shape.numel()).view(shape)
        for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
            found = found.narrow(dim, start, length)
        return found

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> None:
        """Put the parts of tensors that a plan asks for where its planner wants them."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            copy_over([(target, self._part(item.storage_index.fqn, item.storage_offsets, item.lengths))])
            planner.commit_tensor(item, target)


# -- metadata ----------------------------------------------------------------------------------------------------------


class _Properties(TensorProperties):
    """A tensor's dtype; the rest of its properties differs between versions of torch, and is not read."""

    def __setstate__(self, state: Any) -> None:
        self.dtype = state["dtype"] if isinstance(state, dict) else state[0]  # older versions wrote a dictionary


class _Unpickler(pickle.Unpickler):
    """Reads the pickle of a ``.metadata`` file; whatever it names beside torch's plain records is refused."""

    _RECORDS = ("StorageMeta", "BytesStorageMetadata", "ChunkStorageMetadata")
    _PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    _UNUSED = {"_MEM_FORMAT_ENCODING", "_get_layout", *_PATHS}  # functions that return nothing stand for these

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        # Subclasses for each pickle, so that one which sets attributes of a class spoils only its own.
        named = [getattr(dcp.metadata, name) for name in self._RECORDS]
        records = {one.__name__: one for one in (Metadata, MetadataIndex, TensorStorageMetadata, StorageInfo, *named)}
        records["TensorProperties"] = _Properties
        self._classes = {name: type(name, (record,), {}) for name, record in records.items()}
        self._classes |= {"Size": torch.Size, "OrderedDict": dict}

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("torch", "collections", "pathlib"):
            if name in self._classes:
                return self._classes[name]
            if name in self._UNUSED:
                return lambda *arguments: None
            if isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in metadata")


def read_metadata(folder: durable.Path, listed: CheckpointFolder | None = None) -> Metadata:
    """Return what a folder of shards says of its tensors, compared with the files, or with what is `listed`; no code of the file runs.

    FileNotFoundError without metadata; DamagedCheckpoint if it is none, or a file is missing or too short.
    """
    path = os.path.join(folder, METADATA)
    with open(path, "rb") as file, _damage_named(path):
        found = _Unpickler(file).load()
        places = {MetadataIndex(index.fqn, index.offset): place for index, place in found.storage_data.items()}
        paths = {name: tuple(path) for name, path in (found.planner_data or {}).items()}
        problem = _problem_of_files(places, listed or os.fspath(folder))
        if problem := problem or _problem_of_pieces(found.state_dict_metadata):
            raise DamagedCheckpoint(f"{path} is damaged: {problem}.")
        return Metadata(found.state_dict_metadata, paths, places)


def _problem_of_files(places: Mapping[MetadataIndex, StorageInfo], folder: str) -> str:
    """Say which file does not have what it should; an empty text if all have."""
    ends: dict[str, tuple[int, str]] = {}
    for index, place in places.items():
        file, end = place.relative_path, place.offset + place.length
        if file not in ends or end > ends[file][0]:
            ends[file] = end, index.fqn
    if bad := durable.outside(ends):
        return f"the file name {bad[0]!r} leads out of the folder"
    for file, (end, name) in ends.items():
        size = folder.size(file) if isinstance(folder, CheckpointFolder) else None
        if size is None:
            path = os.path.join(folder, *file.split("/"))
            if not os.path.isfile(path):
                return f"{file} is missing"
            size = os.stat(path).st_size
        if end > size:
            return f"{file} has {size} bytes, but {name} ends at {end}"
    return ""


def _problem_of_pieces(values: Mapping[str, Any]) -> str:
    """Say which tensor its pieces are not, whose reader would leave memory as it was; an empty text if all are."""
    for name, value in values.items():
        if not isinstance(value, TensorStorageMetadata):
            continue
        if not isinstance(value.properties.dtype, torch.dtype):
            return f"{name} has the dtype {value.properties.dtype!r}"
        shape, cut = tuple(value.size), set()
        # Ranks that have the same piece may both list it.
        pieces = {(tuple(piece.offsets), tuple(piece.sizes)) for piece in value.chunks}
        for offsets, sizes in pieces:
            for dim, (start, length, whole) in enumerate(zip(offsets, sizes, shape, strict=True)):
                if start < 0 or length < 0 or start + length > whole:
                    return f"{name} of shape {shape} has a piece of shape {sizes} at {offsets}, outside of it"
                cut |= {dim} if length != whole else set()
        stored = sum(math.prod(sizes) for _, sizes in pieces)
        if stored != math.prod(shape):
            return (
                f"{name} of shape {shape} is not whole: of its {math.prod(shape)} elements {stored} are in the files"
            )
        overlaps = False
        if len(cut) == 1 and stored:  # as usual: in turn along one dim
            (dim,), end = cut, 0
            for offsets, sizes in sorted(pieces):
                overlaps = overlaps or (sizes[dim] > 0 and offsets[dim] < end)
                end = max(end, offsets[dim] + sizes[dim])
        elif cut:
            overlaps = not _disjoint([piece for piece in pieces if math.prod(piece[1])], len(shape))
        if overlaps:
            return f"{name} of shape {shape} has pieces that overlap, so that others of its elements are in no file"
    return ""


def _disjoint(pieces: list[Any], dims: int) -> bool:
    """Say whether no two pieces, offsets and sizes, have an element in common."""
    for dim in range(dims):
        groups: list[list[Any]] = []
        end = 0
        for piece in sorted(pieces, key=lambda piece: piece[0][dim]):
            if not groups or piece[0][dim] >= end:
                groups.append([])
            groups[-1].append(piece)
            end = max(end, piece[0][dim] + piece[1][dim])
        if len(groups) > 1:  # which a cut across this dim separates
            return all(_disjoint(group, dims) for group in groups)
    # No cut separates them: a single piece, those that overlap, and few that are laid like bricks around one.
    return not any(
        all(a < b + n and b < a + m for a, m, b, n in zip(*one, *other, strict=True))
        for one, other in itertools.combinations(pieces, 2)
    )
