"""Writing a checkpoint again in another layout or another number of shards, without the run that wrote it.

It needs no process group and no GPU: the files are converted, as if the other ranks had written them. All other files of the
checkpoint are taken over as they are.
"""

import dataclasses
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from accelerate.checkpoint import dcp, formats, fsdp_files, fsdp_optimizer
from accelerate.checkpoint.dcp import Position, Reader, Steps
from accelerate.checkpoint.fsdp_files import Entries, Found, Kind
from accelerate.checkpoint.inspect import all_files, part_of
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, damaged, problems
from accelerate.checkpoint.names import HIDDEN_PREFIXES, LOCK_PREFIX, model_file, optimizer_file
from accelerate.checkpoint.places import LocalPlace, place_of
from accelerate.checkpoint.structure import INDEX_SUFFIX

_COPIED = 4 << 20  # bytes that are read at a time


def reshard(
    source: str,
    target: str,
    layout: Literal["full", "sharded"],
    shards: int = 1,
    max_shard_size: int | str | None = None,
) -> None:
    """Write a checkpoint again in another layout. One process, alone.

    What `save_state` wrote for models that every rank has whole becomes what `load_fsdp_model` and `load_fsdp_optimizer` read
    in parts, and the other way round. The source is verified first and stays as it is; the target appears when all of it is
    on the disk. Weights go through memory in pieces, an optimizer for the full layout as a whole.

    Args:
        source: a checkpoint's folder or URL.
        target: where the other one goes; what has the place is replaced.
        layout: ``"full"`` for ``model.safetensors`` and ``optimizer.bin``, whose parameters are numbered, as torch does;
            ``"sharded"`` for folders in the format of torch's distributed checkpoint, keyed by names.
        shards: for ``"sharded"``: in how many files, as if as many ranks had written them. Any number of ranks reads them.
        max_shard_size: for ``"full"``: the largest size of a file of weights, as `save_model` takes it; more become several
            files with an index. One file by default.

    Raises:
        ValueError: an argument does not fit the others, or the optimizer's parameters have numbers whose names nobody knows.
        FileNotFoundError: there is no checkpoint, or it has no models.
        DamagedCheckpoint: the source is not whole.

    Example:
        >>> reshard("run/checkpoints/checkpoint_7", "run/for_eight", "sharded", shards=8)  # doctest: +SKIP
    """
    limit = _limit(layout, shards, max_shard_size)
    place, there = place_of(source), place_of(target)
    state = place.state()
    if state.kind == "absent":
        raise FileNotFoundError(f"There is no checkpoint at {place.location!r}: {state.reason}.")
    if not state.loads:
        raise DamagedCheckpoint(f"The checkpoint {place.location!r} is not complete: {state.reason}.")
    folder = place.fetch()
    try:
        found = problems(folder, state.manifest, deep=True) if state.manifest else []
        if found:
            raise damaged(place.location, found)
        parts = _parts_of(folder, state.manifest)
        staged = there.stage()
        try:
            entries = _converted(parts, staged, layout, shards, limit)
            entries |= _rest(folder, staged, parts, state.manifest)
            _manifest(state.manifest, entries).write(staged)
            there.upload(staged)
            there.publish()
        except BaseException:
            there.abandon()
            raise
    finally:
        place.release()


def _limit(layout: str, shards: int, max_shard_size: int | str | None) -> int | None:
    if layout not in ("full", "sharded"):
        raise ValueError(f"layout is {layout!r}; choose 'full' or 'sharded'.")
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise ValueError(f"shards is {shards!r}; it is the number of files, at least 1.")
    if layout == "full" and shards != 1:
        raise ValueError(
            f"shards is {shards}, but layout='full' has none. Pass max_shard_size to split files of weights."
        )
    if layout == "sharded" and max_shard_size is not None:
        raise ValueError(
            f"max_shard_size is {max_shard_size!r}, but layout='sharded' has as many files as shards says."
        )
    if max_shard_size is None:
        return None
    from accelerate.offload.sizes import convert_file_size_to_int

    return convert_file_size_to_int(max_shard_size)


# -- what there is -----------------------------------------------------------------------------------------------------


def _parts_of(folder: str, manifest: Manifest | None) -> list[tuple[Kind, Found]]:
    files = all_files(LocalPlace(folder)) if manifest is None else manifest.files
    parts: list[tuple[Kind, Found]] = []
    for kind in ("model", "optimizer"):
        index = 0
        while (found := _find(folder, files, kind, index)) is not None:
            if found.layout == "local":
                raise ValueError(
                    f"{found.name}_rank*.bin in {folder!r} hold what each rank had, which only those ranks can put together. "
                    "Load it there, and save it with SHARDED_STATE_DICT and use_dcp=True."
                )
            parts.append((kind, found))
            index += 1
    if not any(kind == "model" for kind, _ in parts):
        raise FileNotFoundError(
            f"{folder!r} has no model: neither model.safetensors nor pytorch_model_fsdp_0 is there."
        )
    return parts


def _find(folder: str, files: Iterable[str], kind: Kind, index: int) -> Found | None:
    part = part_of(files, kind, index, folder)
    if part is not None:
        return Found(folder, part.name, part.layout, index)
    return fsdp_files.find(folder, kind, index)  # what a killed save has put aside, or what single ranks had


def _files_of(kind: Kind, found: Found) -> set[str]:
    """Return the files and folders of a part, in whatever layout: they are not taken over."""
    index = found.index
    if kind == "optimizer":
        return {fsdp_files.optimizer_folder(index), optimizer_file(index)}
    names = {fsdp_files.model_folder(index), fsdp_files.full_model_file(index)}
    for whole in (model_file(index), model_file(index, False)):
        names |= {whole, f"{whole}{INDEX_SUFFIX}"}
        if os.path.isfile(path := os.path.join(found.folder, f"{whole}{INDEX_SUFFIX}")):
            names.update(fsdp_files.indexed_files(path))
    return names


def _rest(folder: str, staged: str, parts: Sequence[tuple[Kind, Found]], old: Manifest | None) -> Entries:
    """Copy all that is not converted."""
    left = {NAME, fsdp_files.NAMES_FILE}.union(*(_files_of(kind, found) for kind, found in parts))
    names = [
        os.path.relpath(os.path.join(parent, file), folder).replace(os.sep, "/")
        for parent, _, files in os.walk(folder)
        for file in files
    ]
    known = old.files if old is not None else {}
    entries: Entries = {}
    for name in sorted(names):
        if name.split("/")[0] in left or (old is not None and name not in known):
            continue  # what no manifest lists is the user's own, and stays where it is
        if any(part.startswith((*HIDDEN_PREFIXES, LOCK_PREFIX)) for part in name.split("/")):
            continue  # of a save that was killed, or of this one
        there = os.path.join(staged, *name.split("/"))
        os.makedirs(os.path.dirname(there), exist_ok=True)
        with open(os.path.join(folder, *name.split("/")), "rb") as source, formats.durable(there) as file:
            while data := source.read(_COPIED):
                file.write(data)
        told = known.get(name)
        entries[name] = file.entry() if told is None else told
        if told is not None and file.entry().checksum != told.checksum:
            raise damaged(folder, [f"{name} changed while it was copied"])
    return entries


def _manifest(old: Manifest | None, entries: Entries) -> Manifest:
    if old is not None:
        new = Manifest(entries)
        return dataclasses.replace(old, files=entries, created=new.created, versions=new.versions)
    ranks = sum(re.fullmatch(r"random_states_\d+\.pkl", name) is not None for name in entries)
    return Manifest(entries, world_size=max(1, ranks))


# -- converting --------------------------------------------------------------------------------------------------------


def _converted(
    parts: Sequence[tuple[Kind, Found]], staged: str, layout: str, shards: int, limit: int | None
) -> Entries:
    entries: Entries = {}
    names: dict[int, list[list[str]]] = {}
    for kind, found in parts:
        reader = found.reader()
        if kind == "model":
            write = _full_model if layout == "full" else _sharded_model
            entries |= write(reader, staged, found.index, limit if layout == "full" else shards)
            continue
        states, groups, known = _optimizer(reader, found)
        if layout == "full":
            entries |= _full_optimizer(reader, states, groups, staged, found.index)
            if known:
                names[found.index] = [list(group["params"]) for group in groups]
            continue
        if not known:
            raise ValueError(
                f"{found.name} in {found.folder!r} numbers its parameters, and nothing tells their names, by which shards are "
                f"kept: there is no {fsdp_files.NAMES_FILE}, and the optimizer was not made from named_parameters(). Load the "
                "checkpoint into the model, and save it with SHARDED_STATE_DICT."
            )
        entries |= _sharded_optimizer(reader, states, groups, staged, found.index, shards)
    if names:
        entries |= fsdp_files.write_names(names, staged)
    return entries


def _full_model(reader: Reader, staged: str, index: int, limit: int | None) -> Entries:
    specs = fsdp_files.model_specs(reader)
    told = reader.metadata.state_dict_metadata
    if not all(set(keys) == {()} and hasattr(told[keys[()]], "size") for keys in specs.values()):
        # Safetensors has no place for what is no tensor.
        file = model_file(index, safe_serialization=False)
        return {file: formats.write_torch(os.path.join(staged, file), fsdp_files.merged_model(reader))}
    aliases = {name: kept for name, kept in reader.aliases.items() if name in specs and kept in specs}
    shards: list[dict[str, str]] = [{}]
    filled = 0
    for name, keys in specs.items():
        if name in aliases:
            continue
        key = keys[()]
        size = math.prod(told[key].size) * told[key].properties.dtype.itemsize
        if limit is not None and shards[-1] and filled + size > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = key
        filled += size
    stem = model_file(index).removesuffix(".safetensors")
    entries: Entries = {}
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        filled_in = reader.whole(shard.values())
        tensors = {name: filled_in[key] for name, key in shard.items()}
        tied = {name: kept for name, kept in aliases.items() if kept in shard}
        path = os.path.join(staged, file)
        entries[file] = formats.write_safetensors(path, tensors, metadata={"format": "pt"}, aliases=tied)
        where.update(dict.fromkeys([*shard, *tied], file))
    if len(shards) > 1:
        total = sum(
            math.prod(told[key].size) * told[key].properties.dtype.itemsize for s in shards for key in s.values()
        )
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
        file = f"{stem}.safetensors.index.json"
        entries[file] = formats.write_bytes(os.path.join(staged, file), text.encode())
    return entries


def _sharded_model(reader: Reader, staged: str, index: int, shards: int) -> Entries:
    specs = fsdp_files.model_specs(reader)
    items = {
        ("model", name, *steps): _Stored(reader, key) for name, keys in specs.items() for steps, key in keys.items()
    }
    return _write_shards(items, staged, fsdp_files.model_folder(index), shards)


def _optimizer(reader: Reader, found: Found) -> tuple[dict[Any, dict[Steps, str]], list[dict[str, Any]], bool]:
    """Return what is stored of an optimizer, keyed by name if the names are known, and whether they are."""
    states, groups = fsdp_optimizer.stored(reader)
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        return states, groups, True
    names = fsdp_optimizer.told_names(found.folder, found.index, groups)
    if names is None:
        return states, groups, False
    return *fsdp_optimizer.named(states, groups, names), True


def _full_optimizer(
    reader: Reader,
    states: Mapping[Any, Mapping[Steps, str]],
    groups: Sequence[Mapping[str, Any]],
    staged: str,
    index: int,
) -> Entries:
    filled = reader.whole(key for values in states.values() for key in values.values())
    order = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    state: dict[Any, Any] = {}
    for name in sorted(
        states, key=lambda name: order.get(name, len(order))
    ):  # what belongs to no parameter comes last
        values = {steps: filled[key] for steps, key in states[name].items()}
        state[order.get(name, name)] = dcp.nested(values, reader.origin)
    numbered = [{**group, "params": [order[name] for name in group["params"]]} for group in groups]
    file = optimizer_file(index)
    written = formats.write_torch(os.path.join(staged, file), {"state": state, "param_groups": numbered})
    return {file: written}


def _sharded_optimizer(
    reader: Reader,
    states: Mapping[str, Mapping[Steps, str]],
    groups: Sequence[Mapping[str, Any]],
    staged: str,
    index: int,
    shards: int,
) -> Entries:
    items: dict[Steps, Any] = {
        ("optimizer", "state", name, *steps): _Stored(reader, key)
        for name, values in states.items()
        for steps, key in values.items()
    }
    for number, group in enumerate(groups):
        items |= {("optimizer", "param_groups", Position(number), key): value for key, value in group.items()}
    return _write_shards(items, staged, fsdp_files.optimizer_folder(index), shards)


# -- shards ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A value that is read when it is written."""

    reader: Reader
    key: str

    @property
    def spec(self) -> Any:
        return self.reader.metadata.state_dict_metadata[self.key]

    def value(self) -> Any:
        return self.reader.whole([self.key])[self.key]


@dataclasses.dataclass(frozen=True)
class _Together:
    """Values of a dictionary whose keys are no texts, which shards keep in one piece."""

    parts: Mapping[Steps, Any]

    def value(self) -> Any:
        values = {steps: part.value() if isinstance(part, _Stored) else part for steps, part in self.parts.items()}
        return dcp.nested(values, "a dictionary")


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


def _write_shards(items: Mapping[Steps, Any], staged: str, name: str, shards: int) -> Entries:
    """Write values as if as many ranks had, each a slice of every tensor. Memory holds one slice at a time.

    Args:
        items: tensors and other values, by the steps that lead to them.
        staged: the checkpoint's folder.
        name: of the folder in it.
        shards: the number of ranks.
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
            torch.save(formats.plain(value.value() if isinstance(value, (_Stored, _Together)) else value), made)
            return made
        chunk = item.tensor_data.chunk
        if isinstance(value, _Stored):
            return value.reader.part(value.key, chunk.offsets, chunk.sizes)
        return value[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))].clone()

    entries: Entries = {}
    writer = dcp.writer(os.path.join(staged, name), 0, entries, single_file_per_rank=True)
    writer.set_up_storage_writer(True)
    plans, metadata = create_default_global_save_plan([writer.prepare_local_plan(SavePlan(p)) for p in planned])
    plans = writer.prepare_global_plan(plans)
    metadata = dataclasses.replace(metadata, planner_data=_paths(by_key))
    written = [writer.write_data(plan, _Planner(resolve)).wait() for plan in plans if plan.items]
    writer.finish(metadata, written)
    return {f"{name}/{file}": entry for file, entry in entries.items()}


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
    elif isinstance(value, _Stored) and hasattr(value.spec, "size"):
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
