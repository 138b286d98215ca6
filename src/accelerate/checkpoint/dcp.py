"""Folders and files of sharded checkpoints: torch's distributed checkpoint format, written durably and read without trust.

`torch.distributed.checkpoint` (DCP) keeps a folder of ``.distcp`` files, which hold pieces of tensors, and a ``.metadata``
file, which says what piece lies where. It is written by torch's own writer, into files that are hashed on their way. Reading
goes through torch's own planner, which finds the pieces that a rank needs for its shard, whatever shards were written. What
is not torch's here is the access to the files: ``.metadata`` is a pickle, and torch would run what is in it.

Reading needs no process group: each rank reads what it needs, alone, and nothing of the model changes.

Source:
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import contextlib
import dataclasses
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch

from accelerate.checkpoint import disk, durable, formats
from accelerate.checkpoint.dcp_metadata import read_metadata
from accelerate.checkpoint.manifest import DamagedCheckpoint, FileEntry, TensorEntry
from accelerate.checkpoint.names import METADATA
from accelerate.utils.other import load

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.checkpoint import LoadPlan, LoadPlanner
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

Path = str | os.PathLike[str]
# The names that lead to a value within nested dictionaries and lists.
Steps = tuple[str | int, ...]


class Position(int):
    """A step into a list, which a number that is a dictionary's key is not."""


def is_folder(path: Path) -> bool:
    """Say whether a folder is a sharded checkpoint of one model or optimizer.

    Args:
        path: a local folder.
    """
    return os.path.isfile(os.path.join(path, METADATA))


# -- reading -----------------------------------------------------------------------------------------------------------


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

    def _open(self, index: "MetadataIndex") -> "_Slice":
        place = self.metadata.storage_data[index]
        return _Slice(os.path.join(self.origin, *place.file.split("/")), place.offset, place.length)

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


class _Slice(io.RawIOBase):
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
        for file in files:
            if os.fspath(file).endswith(".safetensors"):
                self._values |= formats.mapped(file)
            else:
                for steps, value in leaves(formats.mapped(file)):
                    key = ".".join(map(str, steps))
                    if key in self._values:  # of a number and of a text, for one
                        raise DamagedCheckpoint(f"{self.origin} has two values of the name {key}.")
                    self._values[key], paths[key] = value, steps
        self.aliases = {
            alias: name
            for alias, name in (aliases or {}).items()
            if alias not in self._values and name in self._values
        }
        self._values |= {alias: self._values[name] for alias, name in self.aliases.items()}
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


def leaves(value: Any, steps: Steps = ()) -> Iterator[tuple[Steps, Any]]:
    """Yield the values in nested dictionaries, and lists of those, each with the steps that lead to it.

    Args:
        value: such an object.
        steps: what led to it.
    """
    children: Any = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, list) and any(isinstance(item, (Mapping, torch.Tensor)) for item in value):
        children = ((Position(number), child) for number, child in enumerate(value))
    if not children:
        yield steps, value
    for step, child in children:
        yield from leaves(child, (*steps, step))


def nested(values: Mapping[Steps, Any], where: str) -> Any:
    """Return what `leaves` took apart.

    Args:
        values: by the steps that lead to them. Only the outermost dictionary may also have come in one piece.
        where: for messages.

    Raises:
        DamagedCheckpoint: a value lies inside of one that has no room for it.
    """
    if set(values) == {()}:
        return values[()]
    made: dict[Any, Any] = {}
    for steps, value in values.items():
        target: Any = made
        for step in steps[:-1]:
            target = target.setdefault(step, {}) if isinstance(target, dict) else None
        if not steps and isinstance(value, Mapping):
            made.update(value)
        elif steps and isinstance(target, dict):
            target[steps[-1]] = value
        else:
            raise DamagedCheckpoint(f"{where} has values inside of other values: {'.'.join(map(str, steps))}.")
    return _with_lists(made)


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    made = {key: _with_lists(child) for key, child in value.items()}
    if made and all(type(key) is Position for key in made) and sorted(made) == list(range(len(made))):
        return [made[number] for number in range(len(made))]
    return made


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
            told[name] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, [chunk])
        else:
            told[name] = BytesStorageMetadata()
    return Metadata(told, paths)


# -- writing -----------------------------------------------------------------------------------------------------------


class _Stream(io.RawIOBase):
    """Lets torch's writer write into a durable file."""

    def __init__(self, file: durable.DurableFile) -> None:
        self._file, self._at = file, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count = self._file.write(data)
        self._at += count
        return count

    def tell(self) -> int:
        return self._at


def writer(folder: Path, rank: int, entries: dict[str, FileEntry], **options: Any) -> Any:
    """Return torch's writer for a folder, whose files are hashed on their way and on the disk when they are closed.

    Args:
        folder: where to; it is made.
        rank: who writes.
        entries: gets what the manifest says of each file, by its name in the folder.
        **options: of `FileSystemWriter`.
    """
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.filesystem import FileSystem

    class DurableFiles(FileSystem):
        """The file system of torch's writer."""

        @contextlib.contextmanager
        def create_stream(self, path: Path, mode: str) -> Iterator[Any]:
            with durable.durable(path) as file:
                yield _Stream(file)
            entries[FilePath(path).name] = file.entry(rank)

        def rename(self, path: Path, new_path: Path) -> None:
            os.replace(path, new_path)
            disk.sync_folder(os.path.dirname(os.fspath(new_path)))
            entries[FilePath(new_path).name] = entries.pop(FilePath(path).name)

    class Writer(FileSystemWriter):
        """Torch's writer, which tells what tensors there are."""

        def finish(self, metadata: "Metadata", results: Any) -> None:
            super().finish(metadata, results)
            entries[METADATA] = dataclasses.replace(entries[METADATA], tensors=_tensors_in(metadata))

    made = Writer(folder, sync_files=False, **options)  # a durable file syncs when it is closed
    made.fs = DurableFiles()
    return made


def _tensors_in(metadata: "Metadata") -> dict[str, TensorEntry]:
    """Return the tensors that a manifest tells of a folder, without the name that all of them lie under."""
    paths = metadata.planner_data or {}
    return {
        ".".join(map(str, tuple(paths.get(key, ("", key)))[1:])): formats.tensor_entry(
            spec.size, spec.properties.dtype
        )
        for key, spec in metadata.state_dict_metadata.items()
        if hasattr(spec, "size")
    }


class _Kept:
    """A dictionary that torch would lose or change: an empty one, and one with keys that are no texts."""

    def __init__(self, value: Mapping[Any, Any]) -> None:
        self.value = value


def _keeping(state: Any, steps: Steps, is_part: Callable[[Any], bool]) -> Any:
    """Return a state in which such dictionaries are single values."""
    if isinstance(state, Mapping):
        outer = steps[1:] in ((), ("state",))  # what has all weights or states, of which there may be none
        if (state or outer) and all(isinstance(key, str) for key in state):
            return {key: _keeping(value, (*steps, key), is_part) for key, value in state.items()}
        parts = [".".join(map(str, (*steps, *below))) for below, value in leaves(state) if is_part(value)]
        if parts:
            raise ValueError(
                f"{parts[0]} has shards of a tensor below a key that is no text, which the sharded format cannot hold. Save with "
                "FULL_STATE_DICT, or use texts as keys."
            )
        return _Kept(state)
    if isinstance(state, list):
        return [_keeping(value, (*steps, number), is_part) for number, value in enumerate(state)]
    return state


def _save_planner() -> Any:
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import WriteItemType

    class Planner(DefaultSavePlanner):
        """Torch's planner, which writes what `_Kept` has as one value, and what ranks have whole as the first one has it."""

        def create_global_plan(self, all_plans: list[Any]) -> Any:
            # Torch lets the rank with the least to write it; running statistics, say, differ between ranks.
            seen: set[Any] = set()
            thinned = []
            for plan in all_plans:
                own = [item for item in plan.items if item.type is WriteItemType.SHARD or item.index not in seen]
                seen.update(item.index for item in plan.items if item.type is not WriteItemType.SHARD)
                thinned.append(dataclasses.replace(plan, items=own))
            return super().create_global_plan(thinned)

        def transform_object(self, write_item: Any, object: Any) -> Any:
            return super().transform_object(write_item, object.value if isinstance(object, _Kept) else object)

    return Planner()


def save(
    state: dict[str, Any],
    folder: Path,
    group: "dist.ProcessGroup | None" = None,
    is_part: Callable[[Any], bool] = lambda value: False,
) -> dict[str, FileEntry]:
    """Write a state in torch's sharded format: each rank the shards it has, and its part of what all have. All ranks.

    Args:
        state: nested dictionaries of tensors, DTensors, ShardedTensors and plain values; numpy scalars become `plain`.
        folder: where to; all ranks see the same. What it had is replaced.
        group: the ranks that save, and how they talk; the default group by default.
        is_part: says of a value whether it has only what this rank has of a tensor.

    Returns:
        What the manifest says of the files that this rank wrote, by their name in the folder.

    Raises:
        RuntimeError: writing failed on some rank; raised on all of them.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as torch_dcp

    rank = dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0
    entries: dict[str, FileEntry] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(torch.distributed is|Detected an existing checkpoint)")
        try:
            torch_dcp.save(
                _keeping(formats.plain(state), (), is_part),
                storage_writer=writer(folder, rank, entries),
                planner=_save_planner(),
                process_group=group,
            )
        except torch_dcp.CheckpointException as error:
            failures = "; ".join(f"rank {number}: {cause!r}" for number, (cause, _) in sorted(error.failures.items()))
            raise RuntimeError(f"{os.fspath(folder)} could not be written. {failures}") from error
    return entries
