"""Writing what a checkpoint holds again, in another layout, without the run that wrote it and without a process group.

`export` and `reshard` are one plan with different ends: find the parts of the checkpoint, verify them, open each, write tensor by
tensor into a staged folder, publish. `merge_fsdp_weights` writes one file beside what its folder has. Memory holds one tensor at a
time, but for torch's format.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from accelerate.checkpoint import formats, layouts, manifest, optimizers, state
from accelerate.checkpoint.inspect import INDEX_SUFFIX, all_files
from accelerate.checkpoint.layouts import Found, Kind
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, FileEntry, Manifest, damaged, problems
from accelerate.checkpoint.storage import CheckpointStorage, LocalStorage, State, storage_of
from accelerate.modules.unwrap import canonical_name
from accelerate.offload.sizes import convert_file_size_to_int
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
Progress = Callable[[int], None]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# In front of the names of what a save that was killed left, and of its lock.
_OF_SAVES = (*manifest.HIDDEN_PREFIXES, manifest.LOCK_PREFIX)
# Some may be called so since their names were taken; see `checkpoint.storage`.
_WEIGHTS = re.compile(
    r"(?:(?:model|pytorch_model)(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin)"
    rf"|{re.escape(SAFE_WEIGHTS_INDEX_NAME)}|{re.escape(WEIGHTS_INDEX_NAME)})(?:\.former_\d+)*"
)


def _ignore(size: int) -> None:
    """Be the progress of a caller that asks for none."""


# -- the source and the target -----------------------------------------------------------------------------------------


def _state_of(storage: CheckpointStorage, partly: bool = False) -> State:
    """Return what lies at the source; raise if that does not load. With `partly`, a manifest is enough: a file may be missing."""
    found = storage.state()
    if found.kind == "absent":
        raise FileNotFoundError(f"There is no checkpoint at {storage.location!r}: {found.reason}.")
    if not found.loads and not (partly and found.manifest):
        raise DamagedCheckpoint(f"The checkpoint {storage.location!r} is not complete: {found.reason}.")
    return found


def _sizes(storage: CheckpointStorage, listing: Manifest | None) -> dict[str, int]:
    """Return the checkpoint's files: those that its manifest lists, if it has one."""
    return all_files(storage) if listing is None else {name: entry.size for name, entry in listing.files.items()}


def _part(folder: str, files: Collection[str], kind: Kind, index: int) -> Found | None:
    """Return where a model or optimizer lies; raise if layouts that different runs may have written are side by side."""
    found = layouts.candidates(folder, files, kind, index)
    whole = [one for one in found if one.layout != "local"]
    if len(whole) > 1:
        raise ValueError(
            f"{folder!r} has {kind} {index} more than once: {' and '.join(one.name for one in whole)}. Nothing says which of "
            "them counts; move the others away."
        )
    if found and not whole:
        raise ValueError(
            f"{found[0].name}_rank*.bin in {folder!r} hold what each rank had, which only those ranks can put together. "
            "Load it there, and save it with SHARDED_STATE_DICT and use_dcp=True."
        )
    return whole[0] if whole else None


def _verify(
    location: str, folder: str, listing: Manifest | None, only: Collection[str] | None = None, step: Progress = _ignore
) -> None:
    """Compare the files in the folder of a location, or in a copy of it, with what the manifest says, if there is one."""
    chosen = None if only is None else only.__contains__
    lines = problems(folder, listing, deep=True, only=chosen, progress=step) if listing else []
    if lines:
        raise damaged(location, lines)


@contextlib.contextmanager
def _staged(target: CheckpointStorage) -> Iterator[str]:
    """Give a folder that takes the target's place, complete and on the disk, when the block ends well, and else is removed."""
    staged = target.stage()
    try:
        yield staged
        target.upload(staged)
        target.publish()
    except BaseException:
        target.abandon()
        raise


# -- a model's weights as safetensors ----------------------------------------------------------------------------------


class _Weights:
    """The tensors of a stored model under the names that the user wrote, read when they are written.

    Args:
        stored: the model.
        dtype: what floating-point tensors become; None leaves them as they are.
        step: called with the bytes of each tensor that was read.

    Attributes:
        tensors: without values, as they are going to be written.
        aliases: further names of tensors, to the names that they have among those.

    Raises:
        ValueError: safetensors cannot hold a value, or two of them get one name.
    """

    def __init__(self, stored: "Stored", dtype: torch.dtype | None = None, step: Progress = _ignore) -> None:
        self._stored, self._dtype, self._step = stored, dtype, step
        values = layouts.model_values(stored)
        self._values = {canonical_name(name): value for name, value in values.items()}
        if len(self._values) < len(values):
            raise ValueError("Two tensors have one name without what wrappers put into it, such as `_orig_mod.`.")
        aliases = {name: kept for name, kept in stored.aliases.items() if name in values}
        self.aliases = {canonical_name(name): canonical_name(kept) for name, kept in aliases.items()}
        self.tensors = {}
        try:
            for name in (name for name in self._values if name not in self.aliases):
                value = formats.check_storable(name, self._values[name])
                self.tensors[name] = torch.empty(value.shape, dtype=self._dtype_of(value), device="meta")
        except TypeError as error:
            problem = str(error).partition(". ")[0]
            raise ValueError(f"{stored.origin!r} cannot be exported: {problem}.") from None

    def _dtype_of(self, value: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and value.is_floating_point() else value.dtype

    def read(self, name: str) -> torch.Tensor:
        """Return the values of a tensor."""
        values = self._stored.read(self._values[name])
        self._step(values.nbytes)
        wanted = self._dtype_of(values)
        if values.dtype is wanted:
            return values
        if values.dtype.itemsize == 1:  # torch can do little else with these
            values = values.float()
        made = values.to(wanted)
        if not torch.equal(torch.isinf(made), torch.isinf(values)):
            raise ValueError(
                f"{name!r} has values that {formats.DTYPE_NAMES[wanted]} cannot hold; export it in another dtype."
            )
        return made


def _write_weights(
    weights: _Weights, staged: str, index: int, limit: float = math.inf, with_index: bool = False
) -> Entries:
    """Write a model's weights as one file of safetensors, with an index if `with_index` says so, or as several with an index."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in weights.tensors.items():
        if shards[-1] and filled + tensor.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    stem = manifest.model_file(index).removesuffix(".safetensors")
    entries: Entries = {}
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        tied = {name: kept for name, kept in weights.aliases.items() if kept in shard}
        # Tied names stand in the metadata, where huggingface_hub looks for them.
        metadata, path = {"format": "pt", **tied}, os.path.join(staged, file)
        entries[file] = formats.write_safetensors(path, shard, metadata, aliases=tied, read=weights.read)
        where.update(dict.fromkeys([*shard, *tied], file))
    if len(shards) > 1 or with_index:
        total = sum(tensor.nbytes for tensor in weights.tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True) + "\n"
        file = f"{stem}.safetensors{INDEX_SUFFIX}"
        entries[file] = formats.write_bytes(os.path.join(staged, file), text.encode())
    return entries


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
    max_shard_size: int | str = 5_000_000_000,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int], Progress] | None = None,
) -> Exported:
    """Write the weights of a model in a checkpoint as Hugging Face safetensors. One process.

    Args:
        source: the checkpoint, a folder or a URL.
        target: the folder to write, on a file system that is mounted here.
        model: which of the models, in the order in which they were prepared.
        max_shard_size: largest size of a file, as `save_model` takes it; a larger tensor has a file for itself.
        dtype: what floating-point tensors become, a key of `DTYPES`; None leaves them as they are.
        overwrite: replace the weights in `target`. What else is there stays.
        progress: called with the number of bytes that are going to be read; what it returns is called with the bytes
            of each step.

    Raises:
        FileNotFoundError: there is no such checkpoint, or no such model in it.
        FileExistsError: `target` is in use.
        DamagedCheckpoint: a file that would be read is not what was written.
        UnpicklingError: a file holds objects that are not plain data; no code of it ran.
        ValueError: the weights cannot be written like that, or are there more than once.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}.")
    if (limit := convert_file_size_to_int(max_shard_size)) < 1:
        raise ValueError(f"max_shard_size={max_shard_size} leaves no room for a tensor.")
    storage = storage_of(source)
    there = _export_target(target, storage, overwrite)
    found = _state_of(storage, partly=True)
    sizes = _sizes(storage, found.manifest)
    part = _part(storage.location, sizes, "model", model)
    if part is None:
        raise FileNotFoundError(
            f"{storage.location!r} has no weights of model {model}: there is no {manifest.model_file(model)}, "
            f"{manifest.model_file(model, False)} or {FSDP_MODEL_NAME}_{model}. "
            f"It has {', '.join(sorted(sizes)) or 'no files'}."
        )
    wanted = set(filter(part.has, sizes))
    if part.name.endswith(INDEX_SUFFIX):
        wanted |= set(dataclasses.replace(part, folder=storage.fetch(wanted.__contains__)).files(sizes))
    size = sum(sizes[name] for name in wanted)
    step = _ignore if progress is None else progress(2 * size)
    part = dataclasses.replace(part, folder=storage.fetch(wanted.__contains__))
    _verify(storage.location, part.folder, found.manifest, wanted, step)
    if found.manifest is None:
        logger.warning("%s has no manifest, so its files cannot be verified.", storage.location)
        step(size)
    elif found.kind != "complete":
        logger.warning("%s is incomplete, but its weights are whole: %s.", storage.location, found.reason)
    weights = _Weights(part.open(), DTYPES.get(dtype or ""), step)
    with _staged(there) as staged:
        # Readers may go by an index of an earlier export, until `_clear` has removed it: then one file has one, too.
        entries = _write_weights(weights, staged, 0, limit, SAFE_WEIGHTS_INDEX_NAME in there.files())
    files = {name: entry.size for name, entry in entries.items() if len(entries) > 2 or not name.endswith(".json")}
    _clear(there, files)
    return Exported(files, len(weights.tensors), found.manifest is not None)


def _export_target(target: str | os.PathLike[str], source: CheckpointStorage, overwrite: bool) -> LocalStorage:
    there = storage_of(target)
    if not isinstance(there, LocalStorage):
        raise ValueError(f"{there.location!r} is a URL; export to a local folder and copy it there.")
    found = [*there.files(), *(entry.name for entry in there.entries())]
    problem = ""
    if f"{source.location}/".startswith(f"{there.location}/"):
        problem = "holds the checkpoint that is to be exported; name another folder"
    elif os.path.exists(there.location) and not os.path.isdir(there.location):
        problem = "is a file; name a folder"
    elif any(name == NAME or (manifest.is_checkpoint_file(name) and not _WEIGHTS.fullmatch(name)) for name in found):
        problem = "is a checkpoint, which an export never replaces; name another folder"
    elif found and not overwrite:
        problem = "is not empty. Name another folder, or replace its weights: --overwrite"
    if problem:
        raise FileExistsError(f"{there.location!r} {problem}.")
    return there


def _clear(there: LocalStorage, written: Collection[str]) -> None:
    """Remove the weights of an earlier export, which were carried over with the user's own files."""
    # The index goes last: until then it names what was written now.
    for name in sorted(there.files(), key=lambda name: name == SAFE_WEIGHTS_INDEX_NAME):
        if _WEIGHTS.fullmatch(name) and name not in written:
            os.unlink(os.path.join(there.location, name))


# -- shards as one file of weights -------------------------------------------------------------------------------------


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
    if (folder / manifest.METADATA).is_file():
        return
    if not folder.is_dir():
        raise ValueError(f"checkpoint_dir {folder} does not exist.")
    inside = [path.parent for path in folder.glob(f"*/{manifest.METADATA}")]
    likely = min(inside, key=lambda one: (not one.name.startswith(FSDP_MODEL_NAME), one), default=None)
    hint = f" Did you mean {likely}?" if likely else ""
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
        target: where the other one goes; what is there is replaced.
        layout: ``"full"`` for ``model.safetensors`` and ``optimizer.bin``, whose parameters are numbered, as torch does;
            ``"sharded"`` for folders in the format of torch's distributed checkpoint, keyed by names.
        shards: for ``"sharded"``: in how many files; a tensor is whole in one of them. Any number of ranks reads them.
        max_shard_size: for ``"full"``: the largest size of a file of weights, as `save_model` takes it; more become several
            files with an index. One file by default.

    Raises:
        ValueError: an argument does not fit the others, or the optimizer's parameters have numbers whose names are not known.
        FileNotFoundError: there is no checkpoint, or it has no models.
        DamagedCheckpoint: the source is not whole.

    Example:
        >>> reshard("run/checkpoints/checkpoint_7", "run/for_eight", "sharded", shards=8)  # doctest: +SKIP
    """
    limit = _limit(layout, shards, max_shard_size)
    storage, there = storage_of(source), storage_of(target)
    found = _state_of(storage)
    folder = storage.fetch()
    try:
        _verify(storage.location, folder, found.manifest)
        files = _sizes(LocalStorage(folder), found.manifest)
        parts = _parts_of(folder, files)
        with _staged(there) as staged:
            entries = _converted(parts, staged, layout, shards, limit)
            entries |= _copied(folder, staged, files, parts, found.manifest)
            _manifest(found.manifest, entries).write(staged)
    finally:
        storage.release()


def _limit(layout: str, shards: int, max_shard_size: int | str | None) -> float:
    if layout not in ("full", "sharded"):
        raise ValueError(f"layout is {layout!r}; choose 'full' or 'sharded'.")
    if type(shards) is not int or shards < 1:
        raise ValueError(f"shards is {shards!r}; it is the number of files, at least 1.")
    if layout == "full" and shards != 1:
        raise ValueError(f"shards is {shards}, but layout='full' has none; max_shard_size splits files of weights.")
    if layout == "sharded" and max_shard_size is not None:
        raise ValueError(f"max_shard_size is {max_shard_size!r}, but layout='sharded' takes the number of shards.")
    return math.inf if max_shard_size is None else convert_file_size_to_int(max_shard_size)


def _parts_of(folder: str, files: Collection[str]) -> list[Found]:
    """Return where the models and the optimizers lie."""
    parts: list[Found] = []
    for kind in ("model", "optimizer"):
        for index in itertools.count():
            # What `find` alone finds has been put aside by a killed save.
            found = _part(folder, files, kind, index) or layouts.find(folder, kind, index)
            if found is None:
                break
            parts.append(found)
    if not any(found.kind == "model" for found in parts):
        raise FileNotFoundError(f"{folder!r} has no model: neither model.safetensors nor pytorch_model_fsdp_0.")
    return parts


def _converted(parts: Collection[Found], staged: str, layout: str, shards: int, limit: float) -> Entries:
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
            write(manifest.optimizer_file(found.index), formats.write_torch, stored.read(state.numbered(values)))
        elif all(isinstance(value, torch.Tensor) for value in values.values()):
            entries |= _write_weights(_Weights(stored), staged, found.index, limit)
        else:  # safetensors has no place for what is no tensor
            write(manifest.model_file(found.index, False), formats.write_torch, stored.read(values))
    if known_names:
        write(manifest.PARAMETER_NAMES, formats.write_bytes, state.names_text(known_names))
    return entries


def _named_if_known(found: Found, stored: "Stored") -> dict[str, Any]:
    """Return an optimizer's state, keyed by names where the checkpoint has them."""
    values = optimizers.optimizer_values(stored)
    if optimizers.is_named(values):
        return values
    order = optimizers.saved_names(found.folder, found.index, values["param_groups"])
    return values if order is None else optimizers.named(values, order)


def _write_shards(found: Found, stored: "Stored", values: dict[str, Any], staged: str, files: int) -> Entries:
    from accelerate.checkpoint import shards

    if found.kind == "optimizer" and not optimizers.is_named(values):
        raise ValueError(
            f"{found.name} in {found.folder!r} numbers its parameters, and nothing says their names, by which shards are "
            f"kept: there is no {manifest.PARAMETER_NAMES}, and the optimizer was not made from named_parameters(). Load the "
            "checkpoint into the model, and save it with SHARDED_STATE_DICT."
        )
    name, _ = layouts.usual_names(found.kind, found.index)
    written = shards.save({found.kind: values}, os.path.join(staged, name), stored=stored, files=files)
    return {f"{name}/{file}": entry for file, entry in written.items()}


def _copied(
    folder: str, staged: str, files: Collection[str], parts: Collection[Found], listing: Manifest | None
) -> Entries:
    """Copy all that is not converted."""
    converted = {NAME, manifest.PARAMETER_NAMES}.union(*map(_files_of, parts))
    entries: Entries = {}
    for name in sorted(files):
        steps = name.split("/")
        if steps[0] in converted or any(step.startswith(_OF_SAVES) for step in steps):
            continue
        copy = os.path.join(staged, *steps)
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        shutil.copyfile(os.path.join(folder, *steps), copy)
        written = formats.describe(copy)
        entries[name] = written if listing is None else listing.files[name]
        if entries[name].checksum != written.checksum:
            raise damaged(folder, [f"{name} changed while it was copied"])
    return entries


def _files_of(found: Found) -> set[str]:
    """Return the files and folders that a model or optimizer has in any layout."""
    listed = set(layouts.usual_names(found.kind, found.index))
    for whole, index in layouts.whole_names(found.index) if found.kind == "model" else ():
        listed |= {whole, index}
        if os.path.isfile(os.path.join(found.folder, index)):
            listed.update(dataclasses.replace(found, name=index).files())
    return listed


def _manifest(old: Manifest | None, entries: Entries) -> Manifest:
    ranks = sum(re.fullmatch(r"random_states_\d+\.pkl", name) is not None for name in entries)
    made = Manifest(entries, world_size=max(1, ranks))
    return dataclasses.replace(old, files=entries, created=made.created, versions=made.versions) if old else made
