"""Writing what a checkpoint holds again, in another layout, without the run that wrote it and without a process group.

`export` and `reshard` are one plan with different ends: find the parts of the checkpoint, verify them, open each, write tensor by
tensor into a staged folder, publish. `merge_fsdp_weights` writes one file next to what its folder has. Memory holds one tensor at a
time, but for torch's format.
"""

import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

import torch

from accelerate.base.constants import FSDP_MODEL_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accelerate.base.text import convert_file_size_to_int
from accelerate.checkpoint import formats, layouts, manifest, model_io, optimizers, state
from accelerate.checkpoint.layouts import Found
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, FileEntry, Manifest, damaged, problems
from accelerate.checkpoint.state import Kind
from accelerate.checkpoint.storage import CheckpointStatus, CheckpointStorage, LocalStorage, storage_of
from accelerate.checkpoint.stored import Reader, StoredTensor
from accelerate.checkpoint.verify import with_manifest
from accelerate.extensions.convert.inspect import all_files
from accelerate.extensions.export.files import replace_weights, write_weights
from accelerate.modules.unwrap import canonical_name
from accelerate.process import PartialState
from accelerate.runtime import durable

logger = logging.getLogger(__name__)

Entries = dict[str, FileEntry]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# -- the source and the target -----------------------------------------------------------------------------------------


def _state_of(storage: CheckpointStorage, partly: bool = False) -> CheckpointStatus:
    """Return what is at the source; raise if that does not load. With `partly`, files other than weights may be missing."""
    found = storage.state()
    if found.kind == "absent":
        raise FileNotFoundError(f"There is no checkpoint at {storage.location!r}: {found.reason}.")
    if not found.loads and not (partly and found.manifest):
        raise DamagedCheckpoint(f"The checkpoint {storage.location!r} is not complete: {found.reason}.")
    return found


def _names(storage: CheckpointStorage, listing: Manifest | None) -> Collection[str]:
    """Return the checkpoint's files: those that its manifest lists, if it has one."""
    return (all_files(storage) if listing is None else listing.files).keys()


def _part(folder: str, files: Collection[str], kind: Kind, index: int, of_one_save: bool = False) -> Found | None:
    """Return where a model or optimizer lies, a whole one if there are several `of_one_save`; else raise: different runs may have written them."""
    found = layouts.candidates(with_manifest(folder), files, kind, index)
    if of_one_save:  # safetensors come last: of transformers' models, by the names that hubs know
        found = [one for one in found if one.layout == "full"][-1:] or found
    if len(found) > 1:
        raise ValueError(
            f"{folder!r} has {kind} {index} more than once: {' and '.join(one.name for one in found)}. Nothing says which of "
            "them counts; move the others away."
        )
    return found[0] if found else None


def _refuse_links_out(folder: str, names: Collection[str] = ()) -> None:
    """Raise ValueError if a file in a folder, or one of `names`, is elsewhere: who gets what is written here must not get that."""
    below = [os.path.join(where, file) for where, _, files in os.walk(folder) for file in files]
    for path in [*below, *(os.path.join(folder, name) for name in names)]:
        if not (real := os.path.realpath(path)).startswith(os.path.join(os.path.realpath(folder), "")):
            raise ValueError(
                f"{path!r} is a link to {real!r}, out of the checkpoint. Put the file itself there, or remove it."
            )


# -- a model's weights as safetensors ----------------------------------------------------------------------------------


def _storable(stored: Reader, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return a model's tensors under the user's names, read when `write_weights` writes them, cast to `dtype`.

    Raises ValueError if safetensors cannot hold a value.
    """
    found = layouts.model_values(stored)
    values = {canonical_name(name): value for name, value in found.items()}
    if len(values) < len(found):
        raise ValueError("Two tensors have one name without what wrappers put into it, such as `_orig_mod.`.")
    aliases = {canonical_name(name): canonical_name(kept) for name, kept in stored.aliases.items() if name in found}

    def dtype_of(value: StoredTensor | torch.Tensor) -> torch.dtype:
        return dtype if dtype is not None and value.dtype.is_floating_point else value.dtype

    def read(name: str) -> torch.Tensor:
        value: torch.Tensor = stored.read(values[name])
        if value.dtype is (wanted := dtype_of(value)):
            return value
        if value.dtype.itemsize == 1:  # torch can do little else with these
            value = value.float()
        made = value.to(wanted)
        if not torch.equal(torch.isinf(made), torch.isinf(value)):
            raise ValueError(f"{name!r} has values that {formats.DTYPE_NAMES[wanted]} cannot hold; use another dtype.")
        return made

    from accelerate.checkpoint import dcp  # here: with torch's planner

    tensors = {}
    try:
        for name in (name for name in values if name not in aliases):
            value = formats.check_storable(name, dcp.on_meta(values[name]))
            tensors[name] = value.to(dtype_of(value))
    except TypeError as error:
        problem = str(error).partition(". ")[0]
        raise ValueError(f"{stored.origin!r} cannot be exported: {problem}.") from None
    return {"tensors": tensors, "aliases": aliases, "read": read}


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    model: int = 0,
    max_shard_size: int | str = 5_000_000_000,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Entries:
    """Write model number `model` of a checkpoint as Hugging Face safetensors; return what was written. One process.

    With `overwrite` the weights in `target`, a mounted folder, are replaced; what else is there stays. Raises
    FileExistsError, FileNotFoundError, DamagedCheckpoint, UnpicklingError or ValueError.
    """
    limit = convert_file_size_to_int(max_shard_size)
    storage = storage_of(source)
    there = _export_target(target, storage, overwrite)
    found = _state_of(storage, partly=True)
    names = _names(storage, found.manifest)
    part = _part(storage.location, names, "model", model, of_one_save=found.manifest is not None)
    if part is None:
        raise FileNotFoundError(
            f"{storage.location!r} has no weights of model {model}: there is no {manifest.model_file(model)}, "
            f"{manifest.model_file(model, False)} or {FSDP_MODEL_NAME}_{model}. "
            f"It has {', '.join(sorted(names)) or 'no files'}."
        )
    # The files that an index lists are known when it is here.
    try:
        folder = storage.fetch(None if part.name.endswith(manifest.INDEX_SUFFIX) else part.has)
        part = dataclasses.replace(part, folder=with_manifest(folder))
        _refuse_links_out(folder)
        if found.manifest is None:
            logger.warning("%s has no manifest, so its files cannot be verified.", storage.location)
        elif found.kind != "complete":
            logger.warning("%s is incomplete, but its weights are complete: %s.", storage.location, found.reason)
        content = _storable(part.open(), DTYPES[dtype] if dtype else None)
        return replace_weights(there, pattern=_pattern(0), limit=limit, **content)
    finally:
        storage.release()


def _pattern(index: int) -> str:
    return manifest.model_file(index).replace(".", "{suffix}.")


def _export_target(target: str | os.PathLike[str], source: CheckpointStorage, overwrite: bool) -> str:
    """Return the folder to export to."""
    there = storage_of(target)
    if not isinstance(there, LocalStorage):
        raise ValueError(f"{there.location!r} is a URL; export to a local folder and copy it there.")
    folder = there.location
    found = os.listdir(folder) if os.path.isdir(folder) else []
    of_checkpoints = {NAME, *filter(manifest.is_checkpoint_file, found)} - {SAFE_WEIGHTS_NAME, WEIGHTS_NAME}
    problem = ""
    if f"{source.location}/".startswith(f"{folder}/"):
        problem = "holds the checkpoint that is to be exported; name another folder"
    elif os.path.exists(folder) and not os.path.isdir(folder):
        problem = "is a file; name a folder"
    elif not of_checkpoints.isdisjoint(found):
        problem = "is a checkpoint, which an export never replaces; name another folder"
    elif found and not overwrite:
        problem = "is not empty. Name another folder, or replace its weights: --overwrite"
    if problem:
        raise FileExistsError(f"{folder!r} {problem}.")
    return folder


# -- shards as one file of weights -------------------------------------------------------------------------------------


def merge_fsdp_weights(
    checkpoint_dir: str, output_path: str, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Merge a sharded checkpoint into one file of weights. The main process works, and the others wait for it.

    What the manifest of the checkpoint says of the shards is compared with them first. The file is on the disk, and is
    what was written, before anything is deleted.

    Collective: call on every rank.

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
        from accelerate.checkpoint import dcp  # here: with torch's planner

        _check_sharded(source)
        if remove_checkpoint_dir and source.resolve() in (target.resolve(), *target.resolve().parents):
            raise ValueError(
                f"output_path {target} is in checkpoint_dir {source}, which remove_checkpoint_dir deletes."
            )
        _refuse_links_out(str(source))
        stored = Found(with_manifest(source.parent), source.name, "sharded").open()
        target.mkdir(parents=True, exist_ok=True)
        path = target / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME)
        values = layouts.model_values(stored)
        try:
            if safe_serialization:
                names = [name for name, value in values.items() if isinstance(value, StoredTensor)]
                tensors = {name: dcp.on_meta(values[name]) for name in names}
                entry = formats.write_safetensors(
                    path, tensors, {"format": "pt"}, read=lambda name: stored.read(values[name])
                )
            else:
                entry = formats.write_torch(path, stored.read(values))
            durable.sync_folder(target)
        except BaseException:
            with contextlib.suppress(OSError):
                target.rmdir()  # if a failure leaves it empty
            raise
        if remove_checkpoint_dir:
            if durable.of_file(path) != (entry.size, entry.checksum):
                raise OSError(f"{path} is not what was written, so no shards were deleted.")
            shutil.rmtree(source)

    state.run_on_all_ranks(lambda: merge() if process.is_main_process else None)
    process.wait_for_everyone()


def _distributed_checkpoint_to_merged_weights(
    checkpoint_dir: str, save_path: str, safe_serialization: bool = True
) -> Path:
    """Merge a sharded checkpoint into one file of weights, as `merge_fsdp_weights`, and return the file."""
    merge_fsdp_weights(checkpoint_dir, save_path, safe_serialization)
    return Path(save_path) / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME)


def _check_sharded(folder: Path) -> None:
    if (folder / manifest.METADATA).is_file():
        return
    if not folder.is_dir():
        raise ValueError(f"checkpoint_dir {folder} does not exist.")
    inside = [path.parent for path in folder.glob(f"*/{manifest.METADATA}")]
    likely = min(inside, key=lambda one: (not one.name.startswith(FSDP_MODEL_NAME), one), default=None)
    hint = f" Did you mean {likely}?" if likely else ""
    raise ValueError(f"checkpoint_dir {folder} is no sharded checkpoint: it has no .metadata file.{hint}")


# -- a whole checkpoint -------------------------------------------------------------------------------------------------


def reshard(source: str, target: str, layout: Literal["full", "sharded"], shards: int = 1) -> None:
    """Write a checkpoint again in another layout, over what is at `target`. One process, alone.

    The source is verified first and stays as it is; the target appears when all of it is on the disk. Weights go
    through memory one at a time, an optimizer for the full layout in full. `shards` is a number of files. Raises
    ValueError, FileNotFoundError or DamagedCheckpoint.
    """
    if shards < 1 or (layout == "full" and shards != 1):
        raise ValueError(f"shards is {shards}; it is the number of files of layout='sharded', at least 1.")
    storage, there = storage_of(source), storage_of(target)
    found = _state_of(storage)
    folder = storage.fetch()
    try:
        if found.manifest and (lines := problems(folder, found.manifest, deep=True)):
            raise damaged(storage.location, lines)
        files = _names(LocalStorage(folder), found.manifest)
        parts = _parts_of(folder, files)
        _refuse_links_out(folder, files)
        formats.refuse_unreadable(there.location)
        staged = there.stage()
        entries = _converted(parts, staged, layout, shards)
        entries |= _copied(folder, staged, files, parts, found.manifest)
        made = Manifest(entries)
        if found.manifest is not None:
            made = dataclasses.replace(found.manifest, files=entries, created=made.created, versions=made.versions)
        made.write(staged)
        there.publish()
    finally:
        there.discard()
        storage.release()


def _parts_of(folder: str, files: Collection[str]) -> list[Found]:
    """Return where the models and the optimizers lie."""
    parts: list[Found] = []
    for kind in ("model", "optimizer"):
        for index in itertools.count():
            if (found := _part(folder, files, kind, index)) is None:
                break
            parts.append(found)
    if not any(found.kind == "model" for found in parts):
        raise FileNotFoundError(f"{folder!r} has no model: neither model.safetensors nor pytorch_model_fsdp_0.")
    return parts


def _converted(parts: Collection[Found], staged: str, layout: str, shards: int) -> Entries:
    """Write the models and optimizers in the other layout."""
    entries: Entries = {}
    known_names: dict[int, list[list[str]]] = {}

    def write(file: str, how: Callable[..., FileEntry], content: Any) -> None:
        entries[file] = how(os.path.join(staged, file), content)

    for found in parts:
        stored = found.open()
        values = layouts.model_values(stored) if found.kind == "model" else _named_if_known(found, stored)
        if layout == "sharded":
            entries |= _write_shards(found, stored, values, staged, shards)
        elif found.kind == "optimizer":
            if optimizers.is_named(values):
                known_names[found.index] = [list(group["params"]) for group in values["param_groups"]]
            write(manifest.optimizer_file(found.index), formats.write_torch, stored.read(model_io.numbered(values)))
        elif all(isinstance(value, StoredTensor) for value in values.values()):
            entries |= write_weights(staged, pattern=_pattern(found.index), **_storable(stored))
        else:  # safetensors has no place for what is no tensor
            write(manifest.model_file(found.index, False), formats.write_torch, stored.read(values))
    if known_names:
        write(manifest.PARAMETER_NAMES, formats.write_bytes, model_io.names_text(known_names))
    return entries


def _named_if_known(found: Found, stored: Reader) -> dict[str, Any]:
    """Return an optimizer's state, keyed by names where the checkpoint has them."""
    values = optimizers.optimizer_values(stored)
    if optimizers.is_named(values):
        return values
    order = optimizers.saved_names(found.folder, found.index, values["param_groups"])
    return values if order is None else optimizers.named(values, order)


def _write_shards(found: Found, stored: Reader, values: dict[str, Any], staged: str, files: int) -> Entries:
    from accelerate.checkpoint import dcp

    if found.kind == "optimizer" and not optimizers.is_named(values):
        raise ValueError(
            f"{found.name} in {found.folder!r} numbers its parameters, and nothing says their names, by which shards are "
            f"kept: there is no {manifest.PARAMETER_NAMES}, and the optimizer was not made from named_parameters(). Load the "
            "checkpoint into the model, and save it with SHARDED_STATE_DICT."
        )
    name, _ = layouts.usual_names(found.kind, found.index)
    written = dcp.save({found.kind: values}, os.path.join(staged, name), stored=stored, files=files)
    return {f"{name}/{file}": entry for file, entry in written.items()}


def _copied(folder: str, staged: str, files: Collection[str], parts: list[Found], listing: Manifest | None) -> Entries:
    """Copy all that is not converted."""
    converted = {NAME, manifest.PARAMETER_NAMES}.union(*map(_files_of, parts))
    entries: Entries = {}
    for name in sorted(files):
        steps = name.split("/")
        if steps[0] in converted:
            continue
        copy = os.path.join(staged, *steps)
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        shutil.copyfile(os.path.join(folder, *steps), copy)
        written = formats.describe(copy)
        entries[name] = written if listing is None else listing.files[name]
    return entries


def _files_of(found: Found) -> set[str]:
    """Return the files and folders that a model or optimizer has in any layout."""
    listed = set(layouts.usual_names(found.kind, found.index))
    if (layout := layouts.engine_layouts().get(found.layout)) is not None:
        listed |= {found.name, *layout.companions}
    for whole, index in layouts.full_names(found.index) if found.kind == "model" else ():
        listed |= {whole, index}
        if os.path.isfile(os.path.join(found.folder, index)):
            listed.update(dataclasses.replace(found, name=index).files())
    return listed
