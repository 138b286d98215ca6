"""Torch's distributed format (DCP): a state written by torch's planner into durable files, and the reader of such a folder.

A folder in that format has ``.distcp`` files, which hold pieces of tensors, and ``.metadata``, a pickle that says where each piece is stored.
Torch would run what is in the pickle: here it may name torch's records only, and is compared with the files.

Reading needs no process group. This module imports torch's planner, so others import it when they need it: that takes 50 ms.

Source:
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import contextlib
import copy
import io
import itertools
import math
import operator
import os
import pickle
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from accelerate.checkpoint import formats, plain_data
from accelerate.checkpoint.manifest import METADATA, DamagedCheckpoint, FileEntry
from accelerate.checkpoint.state import is_distributed_tensor, mapped_leaves
from accelerate.checkpoint.stored import OpenFile, Pairs, Plan, Reader, StoredTensor
from accelerate.checkpoint.torch_files import load_each
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.runtime import durable
from accelerate.runtime.torch_private import StorageInfo, unflatten_state_dict

# A process may have 1,024 open files on many systems.
_MOST_OPEN = 128

# -- reading -----------------------------------------------------------------------------------------------------------


class ShardedFolder(Reader):
    """A state in a local folder in torch's format, of which pieces are verified before they are read."""

    def __init__(self, path: durable.Path, folder: CheckpointFolder | None = None) -> None:
        """Read the structure; raise DamagedCheckpoint as `read_metadata`. `folder` is the checkpoint that has the digests."""
        self.origin, self.aliases, self._folder = os.fspath(path), {}, folder
        parent, self._name = os.path.split(self.origin)
        if folder is not None:
            folder.check([f"{self._name}/{METADATA}"])
        self._metadata = read_metadata(path, folder)
        self._reader = dcp.FileSystemReader(path)
        self._files = self._reader.fs = _OpenFiles(parent)
        self._reader.set_up_storage_reader(self._metadata, True)
        files = {place.relative_path for place in self._metadata.storage_data.values()}
        self.holds_files = len(files) <= _MOST_OPEN
        with _damage_named(self.origin):
            specs = self._metadata.state_dict_metadata
            values: dict[str, Any] = {
                key: _TensorInShards(torch.Size(spec.size), spec.properties.dtype, key)
                for key, spec in specs.items()
                if isinstance(spec, TensorStorageMetadata)
            }
            planner = _LoadPlanner()
            if others := [key for key in specs if key not in values]:
                self._plan(planner, dict.fromkeys(others))()
            values = {key: values[key] if key in values else planner.objects[key] for key in specs}
            paths = {key: self._metadata.planner_data.get(key, (key,)) for key in specs}
            self.state = unflatten_state_dict(values, paths)

    def plan(self, pairs: Pairs) -> Plan:
        """Return what fills each target by torch's reader; the pieces of files that it reads are verified."""
        targets: dict[str, torch.Tensor] = {}
        copies = []
        for stored, target in pairs:
            key = cast(_TensorInShards, stored).key
            if targets.setdefault(key, target) is not target:
                copies.append((target, targets[key]))
        read_data = self._plan(_LoadPlanner(), targets)

        def read() -> None:
            read_data()
            for target, source in copies:
                target.copy_(source)

        return read

    def _plan(self, planner: "_LoadPlanner", targets: dict[str, Any]) -> Plan:
        """Return what reads values into targets, and values that are not tensors into the planner; their pieces have been verified."""
        ranges: dict[str, set[tuple[int, int]]] = {}
        with _damage_named(self.origin), torch.no_grad():
            planner.set_up_planner(targets, self._metadata, True)
            plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
            for item in plan.items:
                place = self._metadata.storage_data[item.storage_index]
                file = f"{self._name}/{place.relative_path}"
                ranges.setdefault(file, set()).add((place.offset, place.offset + place.length))
        if self._folder is not None:
            self._folder.check(ranges)  # first, because it may bring files, which take the place of empty ones
        if self.holds_files:
            with _damage_named(self.origin):
                self._files.hold(ranges)

        def read() -> None:
            with _damage_named(self.origin), torch.no_grad():
                self._reader.read_data(plan, planner)
                planner.load_objects()

        return read


@dataclass(eq=False)
class _TensorInShards(StoredTensor):
    """A tensor by its key in torch's metadata."""

    key: str


class _OpenFiles(FileSystem):
    """The file system of torch's reader, whose files are opened when a plan is made."""

    def __init__(self, folder: str) -> None:
        self._folder, self._files = folder, dict[str, OpenFile]()

    def hold(self, names: Iterable[str]) -> None:
        """Keep files open, which are named by their paths in the folder."""
        for name in names:
            path = os.path.join(self._folder, *name.split("/"))
            if path not in self._files:
                self._files[path] = OpenFile(path)

    @contextlib.contextmanager
    def create_stream(self, path: durable.Path, mode: str) -> Iterator[Any]:
        file = self._files.get(os.fspath(path))
        with open(path, mode) if file is None else file.stream() as stream:
            yield stream


@contextlib.contextmanager
def _damage_named(origin: str) -> Iterator[None]:
    """Turn whatever damaged bytes run into within the block into one error."""
    try:
        yield
    except DamagedCheckpoint:
        raise
    except Exception as error:
        raise DamagedCheckpoint(f"{origin} could not be read: {error!r}") from error


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Torch's planner, which would run what bytes say."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self._bytes: dict[str, io.BytesIO] = {}
        self.objects: dict[str, Any] = {}

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self._bytes[read_item.dest_index.fqn] = value

    def load_objects(self) -> None:
        """Unpickle the values whose bytes have been read."""
        if self._bytes:
            self.objects = dict(zip(self._bytes, load_each(self._bytes.values(), "cpu"), strict=True))


# -- metadata ----------------------------------------------------------------------------------------------------------


class _Properties(TensorProperties):
    """A tensor's dtype; the rest of its properties differs between versions of torch, and is not read."""

    def __setstate__(self, state: Any) -> None:
        self.dtype = state["dtype"] if isinstance(state, dict) else state[0]  # older versions wrote a dictionary


class _Unpickler(pickle.Unpickler):
    """Reads the pickle of a ``.metadata`` file; whatever it names next to torch's plain records is refused."""

    _RECORDS = ("StorageMeta", "BytesStorageMetadata", "ChunkStorageMetadata")
    _PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    _UNUSED = {"_MEM_FORMAT_ENCODING", "_get_layout", *_PATHS}  # functions that return nothing stand for these
    # Which Megatron core keeps there.
    _PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        # Subclasses for each pickle, so that one which sets attributes of a class spoils only its own.
        named = [getattr(dcp.metadata, name) for name in self._RECORDS]
        records = {one.__name__: one for one in (Metadata, MetadataIndex, TensorStorageMetadata, StorageInfo, *named)}
        records["TensorProperties"] = _Properties
        self._classes = {name: type(name, (record,), {}) for name, record in records.items()}
        self._classes |= {"Size": torch.Size, "OrderedDict": dict}
        takes_anything = {"__new__": lambda own, *_: object.__new__(own)}
        self._classes |= {name: type(name, (), takes_anything) for name in self._PLANS}

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
    durable.require_file(path)
    with open(path, "rb") as file, _damage_named(path):
        found = _Unpickler(file).load()
        places = {MetadataIndex(index.fqn, index.offset): place for index, place in found.storage_data.items()}
        paths = {name: tuple(path) for name, path in (found.planner_data or {}).items()}
        problem = _problem_of_files(places, os.fspath(folder), listed.listing.files if listed else {})
        if problem := problem or _problem_of_chunks(found.state_dict_metadata):
            raise DamagedCheckpoint(f"{path} is damaged: {problem}.")
        return Metadata(found.state_dict_metadata, paths, places)


def _problem_of_files(
    places: Mapping[MetadataIndex, StorageInfo], folder: str, listed: Mapping[str, FileEntry]
) -> str:
    """Return which file does not have what it should; an empty text if all have."""
    ends: dict[str, tuple[int, str]] = {}
    for index, place in places.items():
        file, end = place.relative_path, place.offset + place.length
        if file not in ends or end > ends[file][0]:
            ends[file] = end, index.fqn
    if bad := durable.outside(ends):
        return f"the file name {bad[0]!r} leads out of the folder"
    for file, (end, name) in ends.items():
        path, entry = os.path.join(folder, *file.split("/")), listed.get(f"{os.path.basename(folder)}/{file}")
        if entry is None and not os.path.isfile(path):
            return f"{file} is missing"
        if end > (size := os.stat(path).st_size if entry is None else entry.size):
            return f"{file} has {size} bytes, but {name} ends at {end}"
    return ""


def _problem_of_chunks(values: Mapping[str, Any]) -> str:
    """Return which tensor its pieces are not, whose reader would leave memory as it was; an empty text if all are."""
    for name, value in values.items():
        if not isinstance(value, TensorStorageMetadata):
            continue
        if not isinstance(value.properties.dtype, torch.dtype):
            return f"{name} has the dtype {value.properties.dtype!r}"
        shape = tuple(value.size)
        # Ranks that have the same piece may both list it.
        pieces = {(tuple(piece.offsets), tuple(piece.sizes)) for piece in value.chunks}
        boxes, stored = [], 0
        for offsets, sizes in pieces:
            for start, length, whole in zip(offsets, sizes, shape, strict=True):
                if start < 0 or length < 0 or start + length > whole:
                    return f"{name} of shape {shape} has a piece of shape {sizes} at {offsets}, outside of it"
            if count := math.prod(sizes):
                stored += count
                boxes.append([(start, start + length) for start, length in zip(offsets, sizes, strict=True)])
        if stored != math.prod(shape):
            return (
                f"{name} of shape {shape} is not whole: of its {math.prod(shape)} elements {stored} are in the files"
            )
        if len(boxes) > 1 and not _disjoint(boxes, len(shape)):
            return f"{name} of shape {shape} has pieces that overlap, so that others of its elements are in no file"
    return ""


def _disjoint(boxes: list[list[tuple[int, int]]], dims: int) -> bool:
    """Return whether no two boxes, each a start and an end per dim, have an element in common."""
    for dim in range(dims):
        groups: list[list[Any]] = []
        covered = 0
        for box in sorted(boxes, key=operator.itemgetter(dim)):
            start, end = box[dim]
            if not groups or start >= covered:
                groups.append([])
            groups[-1].append(box)
            covered = max(covered, end)
        if len(groups) > 1:  # which a cut across this dim separates
            return all(_disjoint(group, dims) for group in groups if len(group) > 1)
    # No cut separates them: those that overlap, and few that are laid like bricks around one.
    return not any(
        all(a < end and start < b for (a, b), (start, end) in zip(*pair, strict=True))
        for pair in itertools.combinations(boxes, 2)
    )


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
    # What has all weights or states, of which there may be none.
    outer = path in ("", "model", "optimizer", "optimizer.state")
    if (state or outer) and all(isinstance(key, str) for key in state):
        return {key: _keeping(value, f"{path}.{key}" if path else key) for key, value in state.items()}

    def refuse_shards(value: Any) -> None:
        if is_distributed_tensor(value):
            raise ValueError(
                f"{path} has shards of a tensor below a key that is no text, which the sharded format cannot hold. Save with "
                "FULL_STATE_DICT, or use texts as keys."
            )

    mapped_leaves(state, refuse_shards)
    return _Kept(state)


def on_meta(value: Any) -> Any:
    """Return a tensor without memory for one that has not been read."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, StoredTensor) else value


@dataclass
class _Plans:
    """What the ranks of a process group planned when they last saved a folder; each rank has its own, the coordinator all of them."""

    own: dcp.SavePlan | None = None
    final: dcp.SavePlan | None = None
    every: list[dcp.SavePlan] = field(default_factory=list)
    metadata: Metadata | None = None


# Weak: gloo closes its connections with the last reference to a process group.
_planned: "weakref.WeakKeyDictionary[Any, dict[str, _Plans]]" = weakref.WeakKeyDictionary()

# Stands for a plan that has not changed.
_AS_BEFORE = dcp.SavePlan([], planner_data="as before")


class _SavePlanner(dcp.DefaultSavePlanner):
    """Torch's planner; plans are kept, and made again when they change, and stored tensors are read when they are written.

    Torch can keep plans as well, but takes those of another dtype for the same.

    Args:
        state: What is saved; torch gets tensors on the meta device in the place of each `StoredTensor`.
        reader: Reads them; None if there are none.
    """

    def __init__(self, state: dict[str, Any], reader: Reader | None, plans: _Plans) -> None:
        super().__init__()
        self._state, self._reader, self._plans = state, reader, plans

    def create_local_plan(self) -> dcp.SavePlan:
        self._own = super().create_local_plan()
        return _AS_BEFORE if self._own == self._plans.own else self._own

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], Metadata]:
        kept = self._plans
        if kept.metadata is None or any(plan != _AS_BEFORE for plan in all_plans):
            every = [kept.every[rank] if plan == _AS_BEFORE else plan for rank, plan in enumerate(all_plans)]
            all_plans, metadata = super().create_global_plan(_shared_out(every))
            kept.every, kept.metadata = every, metadata
        return all_plans, copy.copy(kept.metadata)  # which gets the places of this save

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        kept = self._plans
        # The writer has put its name for files into a new plan.
        if kept.final is None or new_plan.planner_data != _AS_BEFORE.planner_data:
            kept.own, kept.final = self._own, new_plan
        return super().finish_plan(kept.final)

    def lookup_object(self, index: Any) -> Any:
        value: Any = super().lookup_object(index)
        if self._reader is not None:
            value = self._state
            for step in self.mappings[index.fqn]:
                value = value[step]
        value = value.value if isinstance(value, _Kept) else value
        return value if self._reader is None else self._reader.read(value)


def _shared_out(plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
    """Let one rank write each item: of what ranks have whole the first one, of a shard the one with the fewest bytes so far.

    Replicas have the same shards. What is complete may differ between ranks, as running statistics do.
    """
    found: dict[MetadataIndex, tuple[Any, int, list[int]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.index not in found:
                data = item.tensor_data
                size = 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
                found[item.index] = item, size, []
            found[item.index][2].append(rank)
    load, writers = [0] * len(plans), {}
    for item, size, ranks in sorted(found.values(), key=lambda one: -one[1]):
        whole = item.tensor_data is None or item.tensor_data.chunk.sizes == item.tensor_data.size
        writers[item.index] = writer = ranks[0] if whole else min(ranks, key=load.__getitem__)
        load[writer] += size
    # The smallest first: what is small and whole, which every rank reads, lies together in few pieces of the file.
    return [
        replace(plan, items=sorted(mine, key=lambda item: found[item.index][1]))
        for rank, plan in enumerate(plans)
        for mine in [[item for item in plan.items if writers[item.index] == rank]]
    ]


def _writer(
    folder: durable.Path, rank: int, entries: dict[str, FileEntry], files: int, create: formats.Create
) -> dcp.FileSystemWriter:
    """Return torch's writer, whose files are hashed on their way and whole when they are closed; `entries` gets what they are."""

    class CreatedFiles(FileSystem):
        """The file system of torch's writer; a file takes its place when it is complete, so that torch need not rename it."""

        @contextlib.contextmanager
        def create_stream(self, path: durable.Path, mode: str) -> Iterator[Any]:
            path = os.fspath(path).removesuffix(".tmp")  # of the metadata
            with create(path) as file:
                yield file
            entries[os.path.basename(path)] = FileEntry.of(file, rank)

        def exists(self, path: durable.Path) -> bool:
            return False

        def rename(self, *paths: durable.Path) -> None:
            return

    # No sync by the writer: what CreatedFiles creates syncs when it is closed.
    made = dcp.FileSystemWriter(folder, sync_files=False, thread_count=files)
    made.fs = CreatedFiles()
    return made


def save(
    state: dict[str, Any],
    folder: durable.Path,
    group: "dist.ProcessGroup | None" = None,
    stored: Reader | None = None,
    files: int = 1,
    create: formats.Create = durable.durable,
) -> dict[str, FileEntry]:
    """Write a state in torch's sharded format: each rank the shards it has, and its part of what all have.

    Collective: call on every rank.

    Args:
        state: nested dictionaries of tensors, DTensors, ShardedTensors and plain values.
        folder: where to; all ranks see the same. What it had is replaced.
        group: the ranks that save, and how they talk; the default group by default.
        stored: reads each `StoredTensor` in the state, one at a time; then one process writes alone.
        files: how many files a rank writes.
        create: gives the file of a path in the folder to write to.

    Returns:
        What the manifest says of the files that this rank wrote, by their name in the folder.

    Raises:
        RuntimeError: writing failed on some rank; raised on all of them.
    """
    alone = stored is not None or not (dist.is_available() and dist.is_initialized())
    rank = 0 if alone else dist.get_rank(group)
    entries: dict[str, FileEntry] = {}
    kept = {} if alone else _planned.setdefault(group or dist.group.WORLD, {})
    plans = kept.setdefault(os.path.basename(folder), _Plans())
    state = _keeping(plain_data.plain(state))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        try:
            dcp.save(
                state if stored is None else mapped_leaves(state, on_meta),
                storage_writer=_writer(folder, rank, entries, files, create),
                planner=_SavePlanner(state, stored, plans),
                process_group=group,
                no_dist=alone,
            )
        except BaseException as error:
            kept.clear()  # ranks may have come to different steps
            if not isinstance(error, dcp.CheckpointException):
                raise
            failures = "; ".join(f"rank {number}: {cause!r}" for number, (cause, _) in sorted(error.failures.items()))
            raise RuntimeError(f"{os.fspath(folder)} could not be written. {failures}") from error
    return entries
