"""Writing torch's distributed checkpoint format (DCP): torch's own planner and writer, into files that are hashed on their way.

A folder has ``.distcp`` files, which hold pieces of tensors, and ``.metadata``, which says what piece lies where. `readers` reads it.

Source:
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import contextlib
import dataclasses
import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch

from accelerate.checkpoint import formats
from accelerate.checkpoint.manifest import DamagedCheckpoint, FileEntry, TensorEntry
from accelerate.checkpoint.names import METADATA
from accelerate.runtime import durable

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.checkpoint.metadata import Metadata

Path = str | os.PathLike[str]
# The names that lead to a value within nested dictionaries and lists.
Steps = tuple[str | int, ...]

# -- nested states -----------------------------------------------------------------------------------------------------


class Position(int):
    """A step into a list, which a number that is a dictionary's key is not."""


def is_folder(path: Path) -> bool:
    """Say whether a folder is a sharded checkpoint of one model or optimizer.

    Args:
        path: a local folder.
    """
    return os.path.isfile(os.path.join(path, METADATA))


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
            entries[FilePath(path).name] = FileEntry.of(file, rank)

        def rename(self, path: Path, new_path: Path) -> None:
            os.replace(path, new_path)
            durable.sync_folder(os.path.dirname(os.fspath(new_path)))
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


# -- writing as if by many ranks ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stored:
    """A value that is read when it is written.

    Attributes:
        reader: of what it is in, a `readers.Reader`.
        key: what the reader calls it.
    """

    reader: Any
    key: str

    @property
    def spec(self) -> Any:
        """What the metadata says of it."""
        return self.reader.metadata.state_dict_metadata[self.key]

    def value(self) -> Any:
        """Return it whole."""
        return self.reader.whole([self.key])[self.key]


@dataclasses.dataclass(frozen=True)
class _Together:
    """Values of a dictionary whose keys are no texts, which shards keep in one piece."""

    parts: Mapping[Steps, Any]

    def value(self) -> Any:
        values = {steps: part.value() if isinstance(part, Stored) else part for steps, part in self.parts.items()}
        return nested(values, "a dictionary")


def _in_pieces(items: Mapping[Steps, Any]) -> dict[Steps, Any]:
    """Return values by steps that shards can have: keys that are texts, and positions."""
    made: dict[Steps, Any] = {}
    apart: dict[Steps, dict[Steps, Any]] = {}
    for steps, value in items.items():
        end = next((n for n, step in enumerate(steps) if type(step) not in (str, Position)), None)
        if end is None:
            made[steps] = value
        else:
            apart.setdefault(steps[:end], {})[steps[end:]] = value
    return {**made, **{steps: _Together(parts) for steps, parts in apart.items()}}


def _chunks(size: Sequence[int], shards: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield where the parts of a tensor begin and how large they are: slices of dim 0, as `fully_shard` makes them."""
    if not size or not size[0]:
        yield [0] * len(size), list(size)
        return
    rows = -(-size[0] // shards)
    for start in range(0, size[0], rows):
        yield [start, *[0] * (len(size) - 1)], [min(rows, size[0] - start), *size[1:]]


def write_shards(items: Mapping[Steps, Any], folder: Path, shards: int) -> dict[str, FileEntry]:
    """Write values as if as many ranks had, each a slice of every tensor. Memory holds one slice at a time.

    Args:
        items: tensors and other values, by the steps that lead to them.
        folder: where to.
        shards: the number of ranks.

    Returns:
        What the manifest says of the files, by their name in the folder.
    """
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.planner import SavePlan

    by_key = {".".join(map(str, steps)): (steps, value) for steps, value in _in_pieces(items).items()}
    planned: list[list[Any]] = [[] for _ in range(shards)]
    for key, (_, value) in by_key.items():
        for rank, item in enumerate(_write_items(key, value, shards)):
            # What is in one piece goes where the least is.
            planned[rank if item.tensor_data and len(item.index.offset or ()) else _least(planned)].append(item)

    def resolve(item: Any) -> Any:
        value = by_key[item.index.fqn][1]
        if item.tensor_data is None:
            made = io.BytesIO()
            torch.save(formats.plain(value.value() if isinstance(value, (Stored, _Together)) else value), made)
            return made
        chunk = item.tensor_data.chunk
        if isinstance(value, Stored):
            return value.reader.part(value.key, chunk.offsets, chunk.sizes)
        return value[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))].clone()

    entries: dict[str, FileEntry] = {}
    made = writer(folder, 0, entries, single_file_per_rank=True)
    made.set_up_storage_writer(True)
    plans, metadata = create_default_global_save_plan([made.prepare_local_plan(SavePlan(p)) for p in planned])
    plans = made.prepare_global_plan(plans)
    metadata = dataclasses.replace(metadata, planner_data=_paths(by_key))
    written = [made.write_data(plan, _Planner(resolve)).wait() for plan in plans if plan.items]
    made.finish(metadata, written)
    return entries


def _paths(by_key: Mapping[str, tuple[Steps, Any]]) -> dict[str, tuple[Any, ...]]:
    return {
        key: tuple(int(step) if isinstance(step, int) else step for step in steps)
        for key, (steps, _) in by_key.items()
    }


def _least(planned: Sequence[Sequence[Any]]) -> int:
    return min(range(len(planned)), key=lambda rank: len(planned[rank]))


def _write_items(key: str, value: Any, shards: int) -> Iterator[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    size, dtype = None, None
    if isinstance(value, torch.Tensor):
        size, dtype = value.shape, value.dtype
    elif isinstance(value, Stored) and hasattr(value.spec, "size"):
        size, dtype = value.spec.size, value.spec.properties.dtype
    if size is None:
        yield WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
        return
    for offsets, sizes in _chunks(size, shards):
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(size))
        yield WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class _Planner:
    """The part of torch's save planner that a writer asks."""

    def __init__(self, resolve: Callable[[Any], Any]) -> None:
        self.resolve_data = resolve
