"""Writing what a checkpoint holds again, in another layout, without the run that wrote it and without a process group.

`export`, `reshard` and `merge_fsdp_weights` are one plan with different ends: find the parts of the checkpoint, verify them, open a
reader for each, write tensor by tensor into a staged folder, publish. Memory holds one tensor at a time, but for torch's format.
"""

import dataclasses
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from accelerate.checkpoint import dcp, formats, fsdp_files, fsdp_optimizer, fsdp_state, names
from accelerate.checkpoint.dcp import Position, Steps
from accelerate.checkpoint.fsdp_files import Entries, Found, Kind
from accelerate.checkpoint.inspect import all_files, part_of
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, FileEntry, Manifest, damaged, problems
from accelerate.checkpoint.names import METADATA
from accelerate.checkpoint.readers import FolderReader, Reader
from accelerate.checkpoint.storage import CheckpointStorage, LocalStorage, State, storage_of
from accelerate.checkpoint.structure import INDEX_SUFFIX
from accelerate.process import PartialState
from accelerate.runtime import durable
from accelerate.utils.constants import (
    FSDP_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_COPIED = 4 << 20  # bytes that are read at a time
# Some may be called so since their names were taken; see `checkpoint.own`.
_WEIGHTS = re.compile(
    r"(?:(?:model|pytorch_model)(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin)"
    rf"|{re.escape(SAFE_WEIGHTS_INDEX_NAME)}|{re.escape(WEIGHTS_INDEX_NAME)})(?:\.former_\d+)?"
)
Progress = Callable[[int], None]


# -- a model as safetensors ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    Attributes:
        files: names and sizes.
        tensors: how many.
        verified: whether the files that were read had checksums.
    """

    files: Mapping[str, int]
    tensors: int
    verified: bool


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    model: int = 0,
    max_shard_size: int = 5_000_000_000,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int], Progress] | None = None,
) -> Exported:
    """Write the weights of a model in a checkpoint as Hugging Face safetensors. One process.

    Args:
        source: the checkpoint, a folder or a URL.
        target: the folder to write, on a file system that is mounted here.
        model: which of the models, in the order in which they were prepared.
        max_shard_size: largest size of a file in bytes; a larger tensor has a file for itself.
        dtype: what floating-point tensors become, a key of `DTYPES`; None leaves them as they are.
        overwrite: replace the weights in `target`. What else is there stays.
        progress: called with the number of bytes that are going to be read; what it returns is called with the bytes
            of each step.

    Raises:
        FileNotFoundError: there is no such checkpoint, or no such model in it.
        FileExistsError: `target` is in use.
        DamagedCheckpoint: a file that would be read is not what was written.
        ValueError: the weights cannot be written like that, or are there more than once.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}.")
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size={max_shard_size} leaves no room for a tensor.")
    place = storage_of(source)
    there = _target(target, place, overwrite)
    state, sizes = place.state(), {}
    if state.kind == "absent":
        raise FileNotFoundError(f"{place.location!r}: {state.reason}.")
    if state.manifest is not None:
        sizes = {name: entry.size for name, entry in state.manifest.files.items()}
    elif state.kind == "foreign":
        sizes = all_files(place)
    else:
        raise DamagedCheckpoint(f"The checkpoint {place.location!r} is incomplete: {state.reason}.")
    part = part_of(sizes, "model", model, place.location)
    if part is None:
        raise FileNotFoundError(
            f"{place.location!r} has no weights of model {model}: there is no {names.model_file(model)}, "
            f"{names.model_file(model, False)} or {FSDP_MODEL_NAME}_{model}. "
            f"It has {', '.join(sorted(sizes)) or 'no files'}."
        )
    wanted = {name for name in sizes if name == part.name or name.startswith(f"{part.name}/")}
    if part.name.endswith(INDEX_SUFFIX):
        wanted |= set(fsdp_files.indexed_files(os.path.join(place.fetch(wanted.__contains__), part.name), sizes))
    step = (lambda size: None) if progress is None else progress(2 * sum(sizes[name] for name in wanted))
    folder = place.fetch(wanted.__contains__)
    _verify_weights(place, folder, state, wanted, step)
    try:
        reader = Found(folder, part.name, part.layout, model).reader()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{part.name} in {folder!r} holds more than weights, and is not read: {error}") from error
    keys = {name: of_name.get((), "") for name, of_name in fsdp_files.model_specs(reader).items()}
    plan = _Weights(reader, {_plain_name(name): key for name, key in keys.items()}, DTYPES.get(dtype or ""), step)
    if len(plan.keys) < len(keys):
        raise ValueError("Two tensors have one name once torch.compile's part of it, `_orig_mod.`, is left out.")
    staged = there.stage()
    try:
        entries = _write_weights(plan, staged, 0, max_shard_size, SAFE_WEIGHTS_INDEX_NAME in there.files())
        there.publish()
    except BaseException:
        there.abandon()
        raise
    _clear(there, entries)
    files = {name: entry.size for name, entry in entries.items() if len(entries) > 2 or not name.endswith(".json")}
    return Exported(files, len(plan.kept), state.manifest is not None)


def _target(target: str | os.PathLike[str], source: CheckpointStorage, overwrite: bool) -> LocalStorage:
    there = storage_of(target)
    if not isinstance(there, LocalStorage):
        raise ValueError(f"{there.location!r} is a URL; export to a local folder and copy it there.")
    if there == source or f"{source.location}/".startswith(f"{there.location}/"):
        raise FileExistsError(f"{there.location!r} holds the checkpoint that is to be exported; name another folder.")
    if os.path.lexists(there.location) and not os.path.isdir(there.location):
        raise FileExistsError(f"{there.location!r} is a file; name a folder.")
    found = [*there.files(), *(entry.name for entry in there.entries())]
    if any(name == NAME or (names.is_checkpoint_file(name) and not _WEIGHTS.fullmatch(name)) for name in found):
        raise FileExistsError(
            f"{there.location!r} is a checkpoint, which an export never replaces; name another folder."
        )
    if found and not overwrite:
        raise FileExistsError(
            f"{there.location!r} is not empty. Name another folder, or replace its weights: --overwrite."
        )
    return there


def _verify_weights(place: CheckpointStorage, folder: str, state: State, wanted: set[str], step: Progress) -> None:
    if state.manifest is None:
        logger.warning("%s has no manifest, so its files cannot be verified.", place.location)
        for name in wanted:
            step(os.path.getsize(os.path.join(folder, name)))
        return
    found = problems(folder, state.manifest, deep=True, only=wanted.__contains__, progress=step)
    if found:
        raise DamagedCheckpoint(f"The checkpoint {place.location!r} is damaged: {'; '.join(found)}.")
    if state.kind != "complete":
        logger.warning("%s is incomplete, but its weights are whole: %s.", place.location, state.reason)


def _clear(there: LocalStorage, written: Container[str]) -> None:
    """Remove the weights of an earlier export, which were carried over with the user's own files."""
    # The index goes last: until then it names what was written now.
    for name in sorted(there.files(), key=lambda name: name == SAFE_WEIGHTS_INDEX_NAME):
        if _WEIGHTS.fullmatch(name) and (name not in written or len(written) == 2 and name == SAFE_WEIGHTS_INDEX_NAME):
            os.unlink(os.path.join(there.location, name))


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")  # torch.compile's part of a name


class _Weights:
    """Tensors that are read when they are written.

    Args:
        reader: of a model's files.
        keys: names, and what the reader calls them.
        dtype: what floating-point tensors become; None leaves them as they are.
        step: called with the bytes of each tensor that was read.
    """

    def __init__(
        self,
        reader: Reader,
        keys: Mapping[str, str],
        dtype: torch.dtype | None = None,
        step: Progress = lambda size: None,
    ) -> None:
        self.keys, self._reader, self._dtype, self._step = keys, reader, dtype, step
        aliases = {_plain_name(name): _plain_name(kept) for name, kept in reader.aliases.items()}
        self.aliases = {name: kept for name, kept in aliases.items() if name in keys and kept in keys}
        self.kept = {name: self._like(name) for name in keys if name not in self.aliases}

    def _like(self, name: str) -> torch.Tensor:
        """A tensor without values, as it is going to be written."""
        spec = self._reader.metadata.state_dict_metadata.get(self.keys[name])
        if not hasattr(spec, "size"):
            raise ValueError(
                f"{self._reader.origin!r} cannot be exported: safetensors cannot hold {name!r}, which is no tensor."
            )
        about = spec.properties
        made = torch.empty(spec.size, dtype=self._dtype_of(about.dtype), layout=about.layout, device="meta")
        try:
            return formats.check_storable(name, made)
        except TypeError as error:
            raise ValueError(f"{self._reader.origin!r} cannot be exported: {str(error).partition('. ')[0]}.") from None

    def _dtype_of(self, stored: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and stored.is_floating_point else stored

    def read(self, name: str) -> torch.Tensor:
        """Return the values of a tensor."""
        key = self.keys[name]
        values = self._reader.whole([key])[key]
        self._step(values.nbytes)
        wanted = self._dtype_of(values.dtype)
        if values.dtype is wanted:
            return values
        if values.dtype.itemsize == 1:  # torch can do little else with these
            values = values.float()
        made = values.to(wanted)
        if not torch.equal(torch.isinf(made), torch.isinf(values)):
            raise ValueError(
                f"{name!r} has values that {formats.dtype_name(wanted)} cannot hold; export it in another dtype."
            )
        return made


def _write_weights(
    weights: _Weights, staged: str, index: int, limit: int | None = None, with_index: bool = False
) -> Entries:
    """Write a model's weights as one file of safetensors, or as several with an index.

    Of an earlier export an index may be there, by which readers go: then one file has one, too.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in weights.kept.items():
        if limit is not None and shards[-1] and filled + tensor.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    stem = names.model_file(index).removesuffix(".safetensors")
    entries: Entries = {}
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        tied = {name: kept for name, kept in weights.aliases.items() if kept in shard}
        # Tied names stand in the metadata, where huggingface_hub looks for them.
        entries[file] = formats.write_safetensors(
            os.path.join(staged, file), shard, {"format": "pt", **tied}, aliases=tied, read=weights.read
        )
        where.update(dict.fromkeys([*shard, *tied], file))
    if len(shards) > 1 or with_index:
        total = sum(tensor.nbytes for tensor in weights.kept.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True) + "\n"
        file = f"{stem}.safetensors{INDEX_SUFFIX}"
        entries[file] = formats.write_bytes(os.path.join(staged, file), text.encode())
    return entries


# -- shards as one file of weights --------------------------------------------------------------------------------------


def merge_fsdp_weights(
    checkpoint_dir: str, output_path: str, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Merge a sharded checkpoint into one file of weights. All ranks; the main process works, the others wait for it.

    What the manifest of the checkpoint says of the shards is compared with them first. The file is on the disk, and is
    what was written, before anything is deleted.

    Args:
        checkpoint_dir: the folder `pytorch_model_fsdp_0` of a checkpoint, with a `.metadata` file. The whole model must
            fit into memory.
        output_path: the folder for `model.safetensors` or `pytorch_model.bin`; it is made if missing.
        safe_serialization: write safetensors rather than a pickle.
        remove_checkpoint_dir: delete `checkpoint_dir` after the file is written.

    Raises:
        ValueError: `checkpoint_dir` is no sharded checkpoint, or would be deleted together with the result.
        DamagedCheckpoint: a shard is damaged; nothing was deleted.
        RuntimeError: the main process failed; raised on the others.
    """
    state = PartialState()
    source, target = Path(checkpoint_dir).absolute(), Path(output_path)

    def merge() -> None:
        _check_sharded(source)
        if remove_checkpoint_dir and source.resolve() in (target.resolve(), *target.resolve().parents):
            raise ValueError(
                f"output_path {target} lies in checkpoint_dir {source}, which remove_checkpoint_dir deletes."
            )
        Found(str(source.parent), source.name, "sharded").verify()
        reader = FolderReader(source)
        target.mkdir(parents=True, exist_ok=True)
        path = target / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME)
        if safe_serialization:
            keys = {name: of_name[()] for name, of_name in fsdp_files.model_specs(reader).items() if () in of_name}
            weights = _Weights(reader, keys)
            entry = formats.write_safetensors(path, weights.kept, {"format": "pt"}, read=weights.read)
        else:
            entry = formats.write_torch(path, fsdp_files.merged_model(reader))
        durable.sync_folder(target)
        if remove_checkpoint_dir:
            if durable.of_file(path) != (entry.size, entry.checksum):
                raise OSError(f"{path} is not what was written, so no shards were deleted.")
            shutil.rmtree(source)
        logger.info("The merged weights are in %s.", path)

    fsdp_state.together(lambda: merge() if state.is_main_process else None)
    state.wait_for_everyone()


def _check_sharded(folder: Path) -> None:
    if (folder / METADATA).is_file():
        return
    if not folder.is_dir():
        raise ValueError(f"checkpoint_dir {folder} does not exist.")
    inside = sorted(path.parent.name for path in folder.glob("*/.metadata"))
    models = [name for name in inside if name.startswith(FSDP_MODEL_NAME)] or inside
    hint = f" Did you mean {folder / models[0]}?" if models else ""
    raise ValueError(f"checkpoint_dir {folder} is no sharded checkpoint: it has no .metadata file.{hint}")


# -- a whole checkpoint -------------------------------------------------------------------------------------------------


def reshard(
    source: str,
    target: str,
    layout: Literal["full", "sharded"],
    shards: int = 1,
    max_shard_size: int | str | None = None,
) -> None:
    """Write a checkpoint again in another layout. One process, alone.

    The source is verified first and stays as it is; the target appears when all of it is on the disk. Weights go through memory one
    at a time, an optimizer for the full layout as a whole.

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
    place, there = storage_of(source), storage_of(target)
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


def _parts_of(folder: str, manifest: Manifest | None) -> list[tuple[Kind, Found]]:
    files = all_files(LocalStorage(folder)) if manifest is None else manifest.files
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
        return {fsdp_files.optimizer_folder(index), names.optimizer_file(index)}
    listed = {fsdp_files.model_folder(index), fsdp_files.full_model_file(index)}
    for whole in (names.model_file(index), names.model_file(index, False)):
        listed |= {whole, f"{whole}{INDEX_SUFFIX}"}
        if os.path.isfile(path := os.path.join(found.folder, f"{whole}{INDEX_SUFFIX}")):
            listed.update(fsdp_files.indexed_files(path))
    return listed


def _rest(folder: str, staged: str, parts: Sequence[tuple[Kind, Found]], old: Manifest | None) -> Entries:
    """Copy all that is not converted."""
    left = {NAME, fsdp_files.NAMES_FILE}.union(*(_files_of(kind, found) for kind, found in parts))
    present = [
        os.path.relpath(os.path.join(parent, file), folder).replace(os.sep, "/")
        for parent, _, files in os.walk(folder)
        for file in files
    ]
    known = old.files if old is not None else {}
    entries: Entries = {}
    for name in sorted(present):
        if name.split("/")[0] in left or (old is not None and name not in known):
            continue  # what no manifest lists is the user's own, and stays where it is
        if any(part.startswith((*names.HIDDEN_PREFIXES, names.LOCK_PREFIX)) for part in name.split("/")):
            continue  # of a save that was killed, or of this one
        there = os.path.join(staged, *name.split("/"))
        os.makedirs(os.path.dirname(there), exist_ok=True)
        with open(os.path.join(folder, *name.split("/")), "rb") as source, formats.durable(there) as file:
            while data := source.read(_COPIED):
                file.write(data)
        told = known.get(name)
        written = FileEntry.of(file)
        entries[name] = written if told is None else told
        if told is not None and written.checksum != told.checksum:
            raise damaged(folder, [f"{name} changed while it was copied"])
    return entries


def _manifest(old: Manifest | None, entries: Entries) -> Manifest:
    if old is not None:
        new = Manifest(entries)
        return dataclasses.replace(old, files=entries, created=new.created, versions=new.versions)
    ranks = sum(re.fullmatch(r"random_states_\d+\.pkl", name) is not None for name in entries)
    return Manifest(entries, world_size=max(1, ranks))


def _converted(
    parts: Sequence[tuple[Kind, Found]], staged: str, layout: str, shards: int, limit: int | None
) -> Entries:
    entries: Entries = {}
    known_names: dict[int, list[list[str]]] = {}
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
                known_names[found.index] = [list(group["params"]) for group in groups]
            continue
        if not known:
            raise ValueError(
                f"{found.name} in {found.folder!r} numbers its parameters, and nothing tells their names, by which shards are "
                f"kept: there is no {fsdp_files.NAMES_FILE}, and the optimizer was not made from named_parameters(). Load the "
                "checkpoint into the model, and save it with SHARDED_STATE_DICT."
            )
        entries |= _sharded_optimizer(reader, states, groups, staged, found.index, shards)
    if known_names:
        entries |= fsdp_files.write_names(known_names, staged)
    return entries


def _full_model(reader: Reader, staged: str, index: int, limit: int | None) -> Entries:
    specs = fsdp_files.model_specs(reader)
    told = reader.metadata.state_dict_metadata
    if not all(set(keys) == {()} and hasattr(told[keys[()]], "size") for keys in specs.values()):
        # Safetensors has no place for what is no tensor.
        file = names.model_file(index, safe_serialization=False)
        return {file: formats.write_torch(os.path.join(staged, file), fsdp_files.merged_model(reader))}
    return _write_weights(_Weights(reader, {name: keys[()] for name, keys in specs.items()}), staged, index, limit)


def _sharded_model(reader: Reader, staged: str, index: int, shards: int) -> Entries:
    specs = fsdp_files.model_specs(reader)
    items = {
        ("model", name, *steps): dcp.Stored(reader, key) for name, keys in specs.items() for steps, key in keys.items()
    }
    return _write_shards(items, staged, fsdp_files.model_folder(index), shards)


def _optimizer(reader: Reader, found: Found) -> tuple[dict[Any, dict[Steps, str]], list[dict[str, Any]], bool]:
    """Return what is stored of an optimizer, keyed by name if the names are known, and whether they are."""
    states, groups = fsdp_optimizer.stored(reader)
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        return states, groups, True
    told = fsdp_optimizer.told_names(found.folder, found.index, groups)
    if told is None:
        return states, groups, False
    return *fsdp_optimizer.named(states, groups, told), True


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
    file = names.optimizer_file(index)
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
        ("optimizer", "state", name, *steps): dcp.Stored(reader, key)
        for name, values in states.items()
        for steps, key in values.items()
    }
    for number, group in enumerate(groups):
        items |= {("optimizer", "param_groups", Position(number), key): value for key, value in group.items()}
    return _write_shards(items, staged, fsdp_files.optimizer_folder(index), shards)


def _write_shards(items: Mapping[Steps, Any], staged: str, name: str, shards: int) -> Entries:
    written = dcp.write_shards(items, os.path.join(staged, name), shards)
    return {f"{name}/{file}": entry for file, entry in written.items()}
