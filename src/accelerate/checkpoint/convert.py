"""Writing what a checkpoint holds again, in another layout, without the run that wrote it and without a process group.

`export`, `reshard` and `merge_fsdp_weights` are one plan with different ends: find the parts of the checkpoint, verify them, open each,
write tensor by tensor into a staged folder, publish. Memory holds one tensor at a time, but for torch's format.
"""

import dataclasses
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from accelerate.checkpoint import formats, layouts, names, optimizers, state
from accelerate.checkpoint.inspect import INDEX_SUFFIX, all_files
from accelerate.checkpoint.layouts import Found, Kind
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, FileEntry, Manifest, damaged, problems
from accelerate.checkpoint.storage import CheckpointStorage, LocalStorage, State, storage_of
from accelerate.process import PartialState
from accelerate.runtime import durable
from accelerate.utils.constants import (
    FSDP_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

if TYPE_CHECKING:
    from accelerate.checkpoint.shards import Stored

logger = logging.getLogger(__name__)

Entries = dict[str, FileEntry]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Some may be called so since their names were taken; see `checkpoint.storage`.
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
    storage = storage_of(source)
    there = _target(target, storage, overwrite)
    found = storage.state()
    if found.kind == "absent":
        raise FileNotFoundError(f"{storage.location!r}: {found.reason}.")
    if found.manifest is not None:
        sizes = {name: entry.size for name, entry in found.manifest.files.items()}
    elif found.kind == "foreign":
        sizes = all_files(storage)
    else:
        raise DamagedCheckpoint(f"The checkpoint {storage.location!r} is incomplete: {found.reason}.")
    part = _part(storage.location, sizes, "model", model)
    if part is None:
        raise FileNotFoundError(
            f"{storage.location!r} has no weights of model {model}: there is no {names.model_file(model)}, "
            f"{names.model_file(model, False)} or {FSDP_MODEL_NAME}_{model}. "
            f"It has {', '.join(sorted(sizes)) or 'no files'}."
        )
    wanted = set(filter(part.has, sizes))
    if part.name.endswith(INDEX_SUFFIX):
        wanted |= set(dataclasses.replace(part, folder=storage.fetch(wanted.__contains__)).files(sizes))
    step = (lambda size: None) if progress is None else progress(2 * sum(sizes[name] for name in wanted))
    part = dataclasses.replace(part, folder=storage.fetch(wanted.__contains__))
    _verify_weights(storage, part.folder, found, wanted, step)
    try:
        stored = part.open()
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{part.name} in {part.folder!r} holds more than weights, and is not read: {error}"
        ) from error
    weights = _Weights(stored, DTYPES.get(dtype or ""), step)
    staged = there.stage()
    try:
        entries = _write_weights(weights, staged, 0, max_shard_size, SAFE_WEIGHTS_INDEX_NAME in there.files())
        there.publish()
    except BaseException:
        there.abandon()
        raise
    _clear(there, entries)
    files = {name: entry.size for name, entry in entries.items() if len(entries) > 2 or not name.endswith(".json")}
    return Exported(files, len(weights.tensors), found.manifest is not None)


def _part(folder: str, files: Collection[str], kind: Kind, index: int) -> Found | None:
    """Return where a model or optimizer lies; raise if layouts that different runs may have written are side by side."""
    found = [one for one in layouts.candidates(folder, files, kind, index) if one.layout != "local"]
    if len(found) > 1:
        raise ValueError(
            f"{folder!r} has {kind} {index} more than once: {' and '.join(one.name for one in found)}. Nothing tells which of "
            "them counts; move the others away."
        )
    return found[0] if found else None


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


def _clear(there: LocalStorage, written: Collection[str]) -> None:
    """Remove the weights of an earlier export, which were carried over with the user's own files."""
    # The index goes last: until then it names what was written now.
    for name in sorted(there.files(), key=lambda name: name == SAFE_WEIGHTS_INDEX_NAME):
        if _WEIGHTS.fullmatch(name) and (name not in written or len(written) == 2 and name == SAFE_WEIGHTS_INDEX_NAME):
            os.unlink(os.path.join(there.location, name))


class _Weights:
    """The tensors of a stored model, read when they are written, without torch.compile's part of their names.

    Args:
        stored: the model.
        dtype: what floating-point tensors become; None leaves them as they are.
        step: called with the bytes of each tensor that was read.

    Raises:
        ValueError: safetensors cannot hold a value, or two of them get one name.
    """

    def __init__(self, stored: "Stored", dtype: torch.dtype | None = None, step: Progress = lambda size: None) -> None:
        self._stored, self._dtype, self._step = stored, dtype, step
        values = layouts.model_values(stored)
        self._values = {_plain_name(name): value for name, value in values.items()}
        if len(self._values) < len(values):
            raise ValueError("Two tensors have one name once torch.compile's part of it, `_orig_mod.`, is left out.")
        self.aliases = {
            _plain_name(name): _plain_name(kept) for name, kept in stored.aliases.items() if name in values
        }
        self.tensors = {name: self._like(name) for name in self._values if name not in self.aliases}

    def _like(self, name: str) -> torch.Tensor:
        """A tensor without values, as it is going to be written."""
        value = self._values[name]
        try:
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"safetensors cannot hold {name!r}, which is no tensor. ")
            formats.check_storable(name, value)
            made = torch.empty(value.shape, dtype=self._dtype_of(value.dtype), device="meta")
            return formats.check_storable(name, made)
        except TypeError as error:
            origin, problem = self._stored.origin, str(error).partition(". ")[0]
            raise ValueError(f"{origin!r} cannot be exported: {problem}.") from None

    def _dtype_of(self, stored: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and stored.is_floating_point else stored

    def read(self, name: str) -> torch.Tensor:
        """Return the values of a tensor."""
        values = self._stored.read(self._values[name])
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


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _write_weights(
    weights: _Weights, staged: str, index: int, limit: int | None = None, with_index: bool = False
) -> Entries:
    """Write a model's weights as one file of safetensors, or as several with an index.

    Of an earlier export an index may be there, by which readers go: then one file has one, too.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in weights.tensors.items():
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
        total = sum(tensor.nbytes for tensor in weights.tensors.values())
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
    process = PartialState()
    source, target = Path(checkpoint_dir).absolute(), Path(output_path)

    def merge() -> None:
        _check_sharded(source)
        if remove_checkpoint_dir and source.resolve() in (target.resolve(), *target.resolve().parents):
            raise ValueError(
                f"output_path {target} lies in checkpoint_dir {source}, which remove_checkpoint_dir deletes."
            )
        found = Found(str(source.parent), source.name, "sharded")
        found.verify()
        stored = found.open()
        target.mkdir(parents=True, exist_ok=True)
        path = target / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME)
        values = layouts.model_values(stored)
        if safe_serialization:
            tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
            entry = formats.write_safetensors(
                path, tensors, {"format": "pt"}, read=lambda name: stored.read(tensors[name])
            )
        else:
            entry = formats.write_torch(path, stored.read(values))
        durable.sync_folder(target)
        if remove_checkpoint_dir:
            if durable.of_file(path) != (entry.size, entry.checksum):
                raise OSError(f"{path} is not what was written, so no shards were deleted.")
            shutil.rmtree(source)
        logger.info("The merged weights are in %s.", path)

    state.together(lambda: merge() if process.is_main_process else None)
    process.wait_for_everyone()


def _check_sharded(folder: Path) -> None:
    if (folder / names.METADATA).is_file():
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
        shards: for ``"sharded"``: in how many files; a tensor is whole in one of them. Any number of ranks reads them.
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
    storage, there = storage_of(source), storage_of(target)
    found = storage.state()
    if found.kind == "absent":
        raise FileNotFoundError(f"There is no checkpoint at {storage.location!r}: {found.reason}.")
    if not found.loads:
        raise DamagedCheckpoint(f"The checkpoint {storage.location!r} is not complete: {found.reason}.")
    folder = storage.fetch()
    try:
        lines = problems(folder, found.manifest, deep=True) if found.manifest else []
        if lines:
            raise damaged(storage.location, lines)
        parts = _parts_of(folder, found.manifest)
        staged = there.stage()
        try:
            entries = _converted(parts, staged, layout, shards, limit)
            entries |= _rest(folder, staged, parts, found.manifest)
            _manifest(found.manifest, entries).write(staged)
            there.upload(staged)
            there.publish()
        except BaseException:
            there.abandon()
            raise
    finally:
        storage.release()


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
        # What `find` alone finds has been put aside by a killed save, or is what single ranks had.
        while found := _part(folder, files, kind, (index := sum(kind == one for one, _ in parts))) or layouts.find(
            folder, kind, index
        ):
            if found.layout == "local":
                raise ValueError(
                    f"{found.name}_rank*.bin in {folder!r} hold what each rank had, which only those ranks can put together. "
                    "Load it there, and save it with SHARDED_STATE_DICT and use_dcp=True."
                )
            parts.append((kind, found))
    if not any(kind == "model" for kind, _ in parts):
        raise FileNotFoundError(
            f"{folder!r} has no model: neither model.safetensors nor pytorch_model_fsdp_0 is there."
        )
    return parts


def _files_of(kind: Kind, found: Found) -> set[str]:
    """Return the files and folders of a part, in whatever layout: they are not taken over."""
    index = found.index
    if kind == "optimizer":
        return {names.optimizer_folder(index), names.optimizer_file(index)}
    listed = {names.model_folder(index), names.gathered_model_file(index)}
    for whole in (names.model_file(index), names.model_file(index, False)):
        listed |= {whole, f"{whole}{INDEX_SUFFIX}"}
        if os.path.isfile(os.path.join(found.folder, f"{whole}{INDEX_SUFFIX}")):
            listed.update(dataclasses.replace(found, name=f"{whole}{INDEX_SUFFIX}").files())
    return listed


def _rest(folder: str, staged: str, parts: Sequence[tuple[Kind, Found]], old: Manifest | None) -> Entries:
    """Copy all that is not converted."""
    left = {NAME, names.PARAMETER_NAMES}.union(*(_files_of(kind, found) for kind, found in parts))
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
        copy = os.path.join(staged, *name.split("/"))
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        shutil.copyfile(os.path.join(folder, *name.split("/")), copy)
        written = formats.describe(copy)
        entries[name] = known.get(name, written)
        if entries[name].checksum != written.checksum:
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
        stored = found.open()
        if kind == "model":
            values: Any = layouts.model_values(stored)
        else:
            values = optimizers.optimizer_values(stored)
            if not optimizers.is_named(values):
                order = optimizers.told_names(found.folder, found.index, values["param_groups"])
                values = values if order is None else optimizers.named(values, order)
        if layout == "full" and kind == "model":
            entries |= _full_model(stored, values, staged, found.index, limit)
        elif layout == "full":
            if optimizers.is_named(values):
                known_names[found.index] = [list(group["params"]) for group in values["param_groups"]]
            entries |= _torch_file(stored, state.numbered(values), staged, names.optimizer_file(found.index))
        elif kind == "optimizer" and not optimizers.is_named(values):
            raise ValueError(
                f"{found.name} in {found.folder!r} numbers its parameters, and nothing tells their names, by which shards are "
                f"kept: there is no {names.PARAMETER_NAMES}, and the optimizer was not made from named_parameters(). Load the "
                "checkpoint into the model, and save it with SHARDED_STATE_DICT."
            )
        else:
            entries |= _sharded(stored, {kind: values}, staged, found.index, shards)
    if known_names:
        text = optimizers.names_text(known_names)
        entries[names.PARAMETER_NAMES] = formats.write_bytes(os.path.join(staged, names.PARAMETER_NAMES), text)
    return entries


def _full_model(stored: "Stored", values: dict[str, Any], staged: str, index: int, limit: int | None) -> Entries:
    if all(isinstance(value, torch.Tensor) for value in values.values()):
        return _write_weights(_Weights(stored), staged, index, limit)
    # Safetensors has no place for what is no tensor.
    return _torch_file(stored, values, staged, names.model_file(index, safe_serialization=False))


def _torch_file(stored: "Stored", values: Any, staged: str, file: str) -> Entries:
    return {file: formats.write_torch(os.path.join(staged, file), stored.read(values))}


def _sharded(stored: "Stored", values: dict[str, Any], staged: str, index: int, files: int) -> Entries:
    from accelerate.checkpoint import shards

    name = names.model_folder(index) if "model" in values else names.optimizer_folder(index)
    written = shards.save(values, os.path.join(staged, name), stored=stored, files=files)
    return {f"{name}/{file}": entry for file, entry in written.items()}
