"""Layouts of models and optimizers in a checkpoint: finding them, writing them, and reading any of them into any model.

- whole: ``model.safetensors`` or ``pytorch_model.bin``, or several files with an index; ``optimizer.bin``, which numbers its parameters.
  FSDP gathers into ``pytorch_model_fsdp.bin`` and an ``optimizer.bin`` that names them. Transformers' Trainer has an ``optimizer.pt`` with numbers.
- sharded: the folders ``pytorch_model_fsdp_0`` and ``optimizer_0`` in torch's distributed format (`checkpoint.dcp`).
- the layouts of engines (`EngineLayout`), which only their libraries write, a model with its optimizer. They have the float32 weights where the
  files next to them have those of half precision, so they come first.

Parameters have the names that the user wrote (see `checkpoint.state`), so each strategy reads what any other wrote, on any number of
ranks. Everything is read before anything changes.
"""

import contextlib
import itertools
import json
import os
import pathlib
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from accelerate.base._warn import warn_user
from accelerate.base.constants import FSDP_MODEL_NAME
from accelerate.checkpoint import formats, load, manifest, plain_data, state
from accelerate.checkpoint.load import CheckpointFolder
from accelerate.checkpoint.manifest import INDEX_SUFFIX, NAME, DamagedCheckpoint
from accelerate.checkpoint.model_io import ModelState, io_of, is_models_memory
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import (
    Kind,
    Layout,
    from_first_rank,
    is_distributed_tensor,
    run_on_all_ranks,
)
from accelerate.checkpoint.storage import LocalStorage
from accelerate.config.strategies import specs
from accelerate.extension import imported
from accelerate.modules.unwrap import extract_model_from_parallel, match_names, same_tensors, shared_tensor_names
from accelerate.runtime import durable, torch_private

if TYPE_CHECKING:
    from accelerate.checkpoint.dcp import CheckpointReader
    from accelerate.config.fsdp import FullyShardedDataParallelPlugin

Path = str | os.PathLike[str]


class EngineLayout(Protocol):
    """The files of an engine, in a folder that has a model with its optimizer. `StrategySpec.layout` names its class.

    Attributes:
        name: Its name among the layouts.
        companions: Files that belong to it outside its folder.
    """

    name: str
    companions: tuple[str, ...]

    def listed(self, folder: Path) -> list[str]:
        """Return files of the layout in a checkpoint, at least one for each engine. Not a collective."""

    def folder(self, files: Collection[str], kind: Kind, index: int) -> str | None:
        """Return the folder of a model or optimizer among a checkpoint's files. Not a collective."""

    def open(self, path: str, kind: Kind, checkpoint: CheckpointFolder) -> "CheckpointReader":
        """Return what a folder holds of a model or optimizer. Not a collective."""


@cache
def engine_layouts() -> dict[str, EngineLayout]:
    """Return the layouts of engines by their names."""
    layouts: list[EngineLayout] = [imported(spec.layout)() for spec in specs() if spec.layout]
    return {layout.name: layout for layout in layouts}


# -- where they lie ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Where a model or optimizer lies in a checkpoint.

    Attributes:
        name: of the file, index of files, or folder.
        index: which of the models or optimizers it is.
    """

    folder: str
    name: str
    layout: Layout
    index: int = 0
    kind: Kind = "model"

    def open(self, **options: Any) -> "CheckpointReader":
        """Return what it holds. Any rank, alone.

        What is read is compared with the manifest, if there is one; `options` are those of `load.read_file`.
        """
        from accelerate.checkpoint.dcp import CheckpointReader

        if self.layout == "full":
            return CheckpointReader.in_files(*self.read(**options))
        folder, path = load.with_manifest(self.folder), os.path.join(self.folder, self.name)
        if self.layout == "sharded":
            return CheckpointReader.in_folder(path, folder)
        return engine_layouts()[self.layout].open(path, self.kind, folder)

    def read(self, **options: Any) -> tuple[str, dict[str, Any], Mapping[str, str]]:
        """Return where a full layout lies, what it holds, mapped, and the names of tensors stored under another name, to that name."""
        folder, files = load.with_manifest(self.folder), self.files()
        folder.check([self.name, *files, manifest.PARAMETER_NAMES])
        origin = os.path.join(folder, files[0]) if len(files) == 1 else folder
        state: dict[str, Any] = {}
        aliases: dict[str, str] = {}
        for file in files:
            held = load.read_file(folder, file, mapped=True, **options)
            if not isinstance(held, Mapping):
                raise DamagedCheckpoint(f"{folder}/{file} holds a {type(held).__name__}, not a state dict.")
            if twice := sorted(held.keys() & state.keys(), key=str):
                raise DamagedCheckpoint(f"{origin} has two values of the name {twice[0]!r}.")
            aliases |= {} if file.endswith(".safetensors") else same_tensors(held)
            state |= held
        for entry in folder.entries(files):
            aliases |= {name: kept for name, kept in entry.aliases.items() if name not in state and kept in state}
        return origin, state | {alias: state[name] for alias, name in aliases.items()}, aliases

    def files(self) -> list[str]:
        """Return the files of a full layout: itself, or those that it lists."""
        if not self.name.endswith(INDEX_SUFFIX):
            return [self.name]
        path = os.path.join(self.folder, self.name)
        durable.require_file(path)
        with open(path, "rb") as file:
            listed = sorted(manifest.weight_map(file.read(), path))
        for name in listed:
            if not os.path.isfile(os.path.join(self.folder, name)):
                raise DamagedCheckpoint(f"{path} lists {name!r}, which is missing.")
        return listed

    def has(self, file: str) -> bool:
        """Say whether a file belongs to it, beside those that an index lists."""
        return file == self.name or (self.layout != "full" and file.startswith(f"{self.name}/"))


def usual_names(kind: Kind, index: int) -> tuple[str, str]:
    """Return the names of the folder of shards, and of the file into which they are gathered."""
    if kind == "model":
        return f"{FSDP_MODEL_NAME}_{index}", manifest.indexed(FSDP_MODEL_NAME, index, ".bin")
    return f"optimizer_{index}", manifest.optimizer_file(index)


def full_names(index: int) -> list[tuple[str, str]]:
    """Return the names of a model's file of weights, and of an index instead: of safetensors, and of torch's format."""
    return [(file, file + INDEX_SUFFIX) for file in (manifest.model_file(index), manifest.model_file(index, False))]


def candidates(folder: Path, files: Collection[str], kind: Kind, index: int) -> list[Found]:
    """Return where a model or optimizer lies among a checkpoint's `files`, in each layout; the usual one first.

    Of weights in safetensors and in torch's format, as hubs keep them side by side, it is the safetensors. ValueError if there is nothing
    but upstream's files of what each rank had.
    """
    shards, gathered = usual_names(kind, index)
    whole = [gathered, *([manifest.TRAINERS_OPTIMIZER] if (kind, index) == ("optimizer", 0) else ())]
    if kind == "model":
        safe, pickled = full_names(index)
        whole += safe if any(file in files for file in safe) else pickled
    engines = ((layout.folder(files, kind, index), name) for name, layout in engine_layouts().items())
    found: list[tuple[str, Layout]] = [(engine, name) for engine, name in engines if engine is not None]
    found += [(shards, "sharded")] if f"{shards}/{manifest.METADATA}" in files else []
    found += [(file, "full") for file in whole if file in files]
    of_ranks = [f"{shards}_rank0.bin", *([f"{FSDP_MODEL_NAME}_rank0.bin"] if (kind, index) == ("model", 0) else ())]
    if not found and (local := [file for file in of_ranks if file in files]):
        raise ValueError(
            f"{min(local)!r} in {os.fspath(folder)!r} and the files beside it hold what each rank had (LOCAL_STATE_DICT, or use_dcp=False), "
            "which only those ranks can put together. Load the checkpoint by the version that wrote it, on as many ranks, and save "
            "it with SHARDED_STATE_DICT."
        )
    return [Found(os.fspath(folder), name, layout, index, kind) for name, layout in found]


def find(folder: Path, kind: Kind, index: int = 0, prefer: Layout | None = None) -> Found | None:
    """Return where a model or optimizer lies, in the preferred layout if there are several. Any rank, alone."""
    files: Collection[str]
    if isinstance(folder, CheckpointFolder) and folder.listing.files:
        files, name = folder.listing.files, usual_names(kind, index)[0]
    else:
        shards, _ = usual_names(kind, index)
        # What a killed save has put aside counts.
        aside = os.path.relpath(LocalStorage(os.path.join(folder, shards)).fetch(), os.path.realpath(folder))
        name = shards if os.path.isdir(os.path.join(folder, shards)) else aside
        engines = (layout.listed(folder) for layout in engine_layouts().values())
        files = {*os.listdir(folder), *itertools.chain(*engines)}
        if os.path.lexists(os.path.join(folder, name, manifest.METADATA)):  # whose reader names what is no file
            files.add(f"{shards}/{manifest.METADATA}")
    found = candidates(folder, files, kind, index)
    best = next((one for one in found if one.layout == prefer), found[0] if found else None)
    return replace(best, name=name) if best is not None and best.layout == "sharded" else best


def required(folder: Path, kind: Kind, index: int, prefer: Layout | None, what: str = "") -> Found:
    """Return what `find` returns; raise FileNotFoundError if there is none, which says `what` would have read it."""
    found = find(folder, kind, index, prefer)
    if found is None:
        names = [*([manifest.model_file(index)] if kind == "model" else ()), *usual_names(kind, index)]
        raise FileNotFoundError(
            f"{os.fspath(folder)!r} has no {kind} {index}{what and f' ({what})'}: neither {' nor '.join(names)} is there. Load "
            "the folder of a checkpoint, with the models and optimizers in the order in which they were saved."
        )
    return found


def unreadable(folder: Path) -> list[str]:
    """Return a line for each file of a folder at which a reader would fail, as far as headers and ends tell. Any rank, alone."""
    found = []
    for name in sorted(name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name))):
        path = os.path.join(folder, name)
        try:
            if name.endswith(INDEX_SUFFIX):
                Found(os.fspath(folder), name, "full").files()
            elif name.endswith(".json"):
                json.loads(pathlib.Path(path).read_bytes())
            elif name.endswith((".safetensors", ".pt", ".pth", ".bin")):
                with contextlib.suppress(pickle.UnpicklingError):  # it holds more than plain data
                    load.mapped_file(path)
        except Exception as error:  # each format has errors of its own
            found.append(f"{name} cannot be read: {error}")
    return found


# -- models ------------------------------------------------------------------------------------------------------------


def is_extra(name: str) -> bool:
    """Say whether a name is that of a module's extra state, which may be anything."""
    suffix: str = torch_private.EXTRA_STATE_KEY_SUFFIX
    return name.rpartition(".")[2] == suffix


def model_values(stored: "CheckpointReader") -> dict[str, Any]:
    """Return the values of a stored model by name."""
    held = stored.state
    if isinstance(held, Mapping) and len(held) == 1:
        ((name, inner),) = held.items()
        held = inner if isinstance(inner, Mapping) and not is_extra(str(name)) else held

    def flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        nested = isinstance(value, Mapping) and not is_extra(path)
        for key, inner in value.items() if nested else ():
            yield from flat(inner, f"{path}.{key}" if path else str(key))
        if not nested:
            yield path, value

    return dict(flat(held, ""))


def matched(
    own: Mapping[str, Any],
    values: Mapping[str, Any],
    ties: Callable[[], Sequence[Sequence[str]]],
    aliases: Collection[str] = (),
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return stored values by the names that a model has, also for tied ones; its names that are missing; and stored names it does not have.

    Names of other wrappers fit. `ties` is asked if names are missing. `aliases` are stored under another name, too, and need not be the model's.
    """
    pairs = match_names(own, values)
    found = {wanted: values[name] for name, wanted in pairs.items()}
    for group in ties() if len(found) < len(own) else ():
        known = next((name for name in group if name in found), None)
        found |= {name: found[known] for name in group if known and name in own and name not in found}
    others = [name for name in values if name not in pairs and name not in aliases]
    return found, [name for name in own if name not in found], others


@state.quietly()
def read_model(
    own: ModelState,
    stored: "CheckpointReader",
    ties: Callable[[], Sequence[Sequence[str]]] = list,
    strict: bool = True,
    over: bool = False,
    elsewhere: Collection[str] = (),
) -> dict[str, Any]:
    """Read a model's state into new memory, each rank its shards; nothing else changes. Any rank, alone.

    Names of the whole model that are `elsewhere`, on other stages of a pipeline, are no strangers.
    With ``over``, `CheckpointReader.finish` reads the tensors later, over the model's own.
    """
    found, missing, others = matched(own.values, model_values(stored), ties, {*stored.aliases, *elsewhere})
    problems = misfits(own.values, found, *((missing, others) if strict else ()))
    load.refuse_misfit(stored.origin, "the model", problems)
    read, later = {}, []
    for name, value in found.items():
        mine = own.values[name]
        if is_extra(name):  # it may be anything, and differ from what the module has now
            read[name] = stored.allocate(value)
        elif not isinstance(value, torch.Tensor):
            read[name] = value
        elif over:
            read[name] = mine
            later.append((value, mine))
        else:
            read[name] = read_like(mine, value, stored)
    stored.over(later)
    stored.fill()
    return read


def misfits(
    own: Mapping[str, Any], found: Mapping[str, Any], missing: Sequence[str] = (), others: Sequence[str] = ()
) -> list[str]:
    """Return a line for each way in which stored values, as `matched` returns them, are not what a model has."""
    lines = []
    for name, value in found.items():
        if nn.parameter.is_lazy(own[name]):
            continue
        shapes = [tuple(one.size()) if isinstance(one, torch.Tensor) else "no tensor" for one in (value, own[name])]
        if shapes[0] != shapes[1] and not is_extra(name):
            lines.append(f"{name} has {shapes[0]} in the file and {shapes[1]} in the model")
    lines += [f"{name} is missing in the file" for name in missing]
    return lines + [f"{name} is unexpected in the file" for name in others]


def read_like(own: torch.Tensor, value: torch.Tensor, stored: "CheckpointReader") -> torch.Tensor | None:
    """Return a stored value with the sharding of a tensor of its shape; None if it has another shape, or other shards."""
    if value.size() != own.size():
        return None
    if is_distributed_tensor(own):
        return stored.into(value, state.empty_on_host_like(own, value.dtype))
    memory: torch.Tensor = stored.allocate(value)
    return memory


# -- saving and loading what is spread over ranks ----------------------------------------------------------------------


def layout_of(plugin: "FullyShardedDataParallelPlugin | None", use_dcp: bool = True) -> Layout:
    """Return how a checkpoint keeps the shards: as they are, without a plugin. It is never a file per rank, which no other ranks could load."""
    name = "SHARDED_STATE_DICT" if plugin is None else plugin.state_dict_type.name
    if name == "LOCAL_STATE_DICT" or not use_dcp:
        warn_user(
            f"state_dict_type={name} with use_dcp={use_dcp} asks for a file per rank, which only as many ranks in the same layout could "
            "load; shards are written instead, and any number of ranks loads them. SHARDED_STATE_DICT says so without a warning."
        )
    return "full" if name == "FULL_STATE_DICT" and use_dcp else "sharded"


def write(values: dict[str, Any], folder: Path, kind: Kind, index: int = 0, layout: Layout = "sharded") -> None:
    """Write a state into a folder that all ranks see, or put it into a plan. All ranks; failures are raised on all.

    ValueError for a folder with a manifest.
    """
    shards, name = usual_names(kind, index)
    if layout == "full":
        values = state.gathered(values)
    owns = layout == "full" and state.rank_and_size()[0] == 0

    def check() -> None:
        others = formats.rebuilt(values, lambda value: None if isinstance(value, torch.Tensor) else value)
        plain_data.refuse_unreadable({f"{kind} {index}": others})

    if isinstance(folder, SavePlan):
        check()
        if layout == "sharded":
            folder.add_shards(shards, {kind: values})
        elif owns:
            folder.add_object(name, values)
        return

    def put() -> None:
        check()
        os.makedirs(folder, exist_ok=True)
        if os.path.exists(os.path.join(folder, NAME)):
            raise ValueError(f"{os.fspath(folder)!r} is a checkpoint of save_state. Save to another folder.")
        if owns:
            formats.write_torch(os.path.join(folder, name), values)

    run_on_all_ranks(put)
    if layout == "sharded":
        _publish_shards({kind: values}, os.path.join(folder, shards))


def _publish_shards(values: dict[str, Any], folder: str) -> None:
    """Write shards aside, and let them take their place together."""
    from accelerate.checkpoint import dcp

    main = state.rank_and_size()[0] == 0
    storage = LocalStorage(folder)
    staged = from_first_rank(run_on_all_ranks(lambda: storage.stage() if main else ""))
    try:
        dcp.save(values, staged)
        run_on_all_ranks(lambda: storage.publish() if main else None)
    finally:
        storage.discard()


def read_for_model(
    model: nn.Module,
    folder: Path,
    index: int = 0,
    prefer: Layout | None = None,
    strict: bool = True,
    over: bool = False,
    **getter: Any,
) -> tuple[dict[str, Any], ModelState, Callable[[], None] | None]:
    """Read a model's state, whatever wrote it, as `apply_model` takes it. All ranks; what fails is raised where it fails.

    With `over`, for a verified checkpoint and a model that cannot refuse it, it is read later, over what there is.
    Returns the state, the model's own, and what reads over the model's own; None if it is read.
    """

    def opened() -> "CheckpointReader":
        return required(folder, "model", index, prefer).open()

    model_io = io_of(model)
    stored = run_on_all_ranks(opened) if model_io.is_collective else opened()
    own = model_io.model_state(model, **getter)
    over = over and isinstance(folder, CheckpointFolder) and is_models_memory(own, model)
    read = read_model(own, stored, partial(model_io.tied_names, model), strict, over, model_io.elsewhere(model))
    return read, own, stored.finish if over else None


# -- reading into whole models and their optimizers --------------------------------------------------------------------


def read_full_model(
    model: nn.Module, folder: Path, index: int = 0, strict: bool = True, **options: Any
) -> dict[str, Any]:
    """Return a model's weights, in whatever layout, for ``load_state_dict`` of the module inside, which stays as it is. Any rank, alone.

    Names match whatever wrappers wrote them, and tied weights that the file has once are filled in. ``state_dict``
    of the model is called once. FileNotFoundError without weights; RuntimeError lists what differs.
    """
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    found = required(folder, "model", index, "full", type(model).__name__)
    own = model.state_dict()
    if found.layout == "full":
        _, values, aliases = found.read(**options)
    else:
        stored = found.open(**options)
        values, aliases = model_values(stored), stored.aliases

    def ties() -> list[list[str]]:
        groups = shared_tensor_names(own)
        return [[name for name in group if own[name].shape == own[group[0]].shape] for group in groups]

    read, missing, others = matched(own, values, ties, aliases)
    problems = misfits(own, read, *((missing, others) if strict and load.loads_by_name(model) else ()))
    origin, more = os.path.join(folder, found.name), ", or load with strict=False, which accepts other names"
    load.refuse_misfit(origin, type(model).__name__, problems, more)
    read |= {name: values[name] for name in others}  # hooks of the model may rename them
    return read if found.layout == "full" else stored.read(read)
