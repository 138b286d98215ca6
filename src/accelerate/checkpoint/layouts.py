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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from accelerate.base._warn import warn_user
from accelerate.base.constants import FSDP_MODEL_NAME
from accelerate.checkpoint import manifest, plain_data, state
from accelerate.checkpoint.apply import Change, loads_by_name, model_change
from accelerate.checkpoint.manifest import INDEX_SUFFIX, DamagedCheckpoint, Manifest
from accelerate.checkpoint.model_io import ModelState, io_of
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import (
    Kind,
    Layout,
    is_distributed_tensor,
    mapped_leaves,
    run_on_all_ranks,
)
from accelerate.checkpoint.storage import LocalStorage
from accelerate.checkpoint.stored import FullFiles, Plan, Reader, StoredTensor, read_whole
from accelerate.checkpoint.verify import CheckpointFolder, with_manifest
from accelerate.config.strategies import specs
from accelerate.extension import imported
from accelerate.modules.unwrap import match_names, shared_tensor_names
from accelerate.runtime import durable, torch_private

if TYPE_CHECKING:
    from accelerate.config.fsdp import FullyShardedDataParallelPlugin

Path = str | os.PathLike[str]

_TENSORS = (torch.Tensor, StoredTensor)


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

    def open(self, path: str, kind: Kind, checkpoint: CheckpointFolder) -> Reader:
        """Return the reader of a model or optimizer in a folder. Not a collective."""


@cache
def engine_layouts() -> dict[str, EngineLayout]:
    """Return the layouts of engines by their names."""
    layouts: list[EngineLayout] = [imported(spec.layout)() for spec in specs() if spec.layout]
    return {layout.name: layout for layout in layouts}


# -- where they lie ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Where a model or optimizer is in a checkpoint.

    Attributes:
        name: of the file, index of files, or folder.
        index: which of the models or optimizers it is.
    """

    folder: CheckpointFolder
    name: str
    layout: Layout
    index: int = 0
    kind: Kind = "model"

    def open(self, load_kwargs: Mapping[str, Any] | None = None) -> Reader:
        """Return the reader of it, which compares what it reads with the manifest, if there is one.

        `load_kwargs` are those of ``torch.load``.

        Not a collective.
        """
        folder, path = self.folder, os.path.join(self.folder.path, self.name)
        if self.layout == "sharded":
            from accelerate.checkpoint.dcp import ShardedFolder  # here: torch's planner takes 50 ms to import

            return ShardedFolder(path, folder)
        if self.layout != "full":
            return engine_layouts()[self.layout].open(path, self.kind, folder)
        files = self.files()
        folder.check([self.name, *files, manifest.PARAMETER_NAMES])
        reader = FullFiles(os.path.join(folder.path, files[0]) if len(files) == 1 else folder.path)
        state: dict[str, Any] = reader.state
        for file in files:
            values = reader.open(os.path.join(folder.path, file), load_kwargs)
            if not isinstance(values, Mapping):
                raise DamagedCheckpoint(f"{folder}/{file} holds a {type(values).__name__}, not a state dict.")
            if twice := sorted(values.keys() & state.keys(), key=str):
                raise DamagedCheckpoint(f"{reader.origin} has two values of the name {twice[0]!r}.")
            state |= values
        entries = folder.entries(files)
        for file in files:
            for name, kept in entries[file].aliases.items() if file in entries else ():
                if name not in state and kept in state:
                    reader.aliases = {**reader.aliases, name: kept}
        state |= {alias: state[name] for alias, name in reader.aliases.items()}
        return reader

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
        """Return whether a file belongs to it, next to those that an index lists."""
        return file == self.name or (self.layout != "full" and file.startswith(f"{self.name}/"))


def usual_names(kind: Kind, index: int) -> tuple[str, str]:
    """Return the names of the folder of shards, and of the file into which they are gathered."""
    if kind == "model":
        return f"{FSDP_MODEL_NAME}_{index}", manifest.indexed(FSDP_MODEL_NAME, index, ".bin")
    return f"optimizer_{index}", manifest.optimizer_file(index)


def full_names(index: int) -> list[tuple[str, str]]:
    """Return the names of a model's file of weights, and of an index instead: of safetensors, and of torch's format."""
    return [(file, file + INDEX_SUFFIX) for file in (manifest.model_file(index), manifest.model_file(index, False))]


def candidates(folder: CheckpointFolder, files: Collection[str], kind: Kind, index: int) -> list[Found]:
    """Return where a model or optimizer lies among a checkpoint's `files`, in each layout; the usual one first.

    Of weights in safetensors and in torch's format, as hubs keep them side by side, it is the safetensors. ValueError if there is nothing
    but upstream's files of what each rank had.
    """
    shards, gathered = usual_names(kind, index)
    full = [gathered]
    if kind == "model":
        safe, pickled = full_names(index)
        full += safe if safe[0] in files or safe[1] in files else pickled
    elif index == 0:
        full.append(manifest.TRAINERS_OPTIMIZER)
    found = []
    for layout in engine_layouts().values():
        if (engine := layout.folder(files, kind, index)) is not None:
            found.append(Found(folder, engine, layout.name, index, kind))
    if f"{shards}/{manifest.METADATA}" in files:
        found.append(Found(folder, shards, "sharded", index, kind))
    for file in full:
        if file in files:
            found.append(Found(folder, file, "full", index, kind))
    of_ranks = [f"{shards}_rank0.bin", *([f"{FSDP_MODEL_NAME}_rank0.bin"] if (kind, index) == ("model", 0) else ())]
    if not found and (local := [file for file in of_ranks if file in files]):
        raise ValueError(
            f"{min(local)!r} in {folder!r} and the files next to it hold what each rank had (LOCAL_STATE_DICT, or use_dcp=False), "
            "which only those ranks can put together. Load the checkpoint by the version that wrote it, on as many ranks, and save "
            "it with SHARDED_STATE_DICT."
        )
    return found


def find(folder: Path, kind: Kind, index: int = 0, prefer: Layout | None = None) -> Found | None:
    """Return where a model or optimizer lies, in the preferred layout if there are several. Not a collective."""
    folder = with_manifest(folder)
    if folder.listing.files:
        found = candidates(folder, folder.listing.files, kind, index)
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
        found = [replace(place, name=name) if place.layout == "sharded" else place for place in found]
    return min(found, key=lambda place: place.layout != prefer, default=None)


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
    """Return a line for each file of a folder at which a reader would fail, as far as headers and ends tell.

    Not a collective.
    """
    found = []
    for name in sorted(name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name))):
        path = os.path.join(folder, name)
        try:
            if name.endswith(INDEX_SUFFIX):
                Found(CheckpointFolder(os.fspath(folder), Manifest({})), name, "full").files()
            elif name.endswith(".json"):
                json.loads(pathlib.Path(path).read_bytes())
            elif name.endswith((".safetensors", ".pt", ".pth", ".bin")):
                with contextlib.suppress(pickle.UnpicklingError):  # it holds more than plain data
                    read_whole(path)
        except Exception as error:  # each format has errors of its own
            found.append(f"{name} cannot be read: {error}")
    return found


# -- models ------------------------------------------------------------------------------------------------------------


def is_extra(name: str) -> bool:
    """Return whether a name is that of a module's extra state, which may be anything."""
    suffix: str = torch_private.EXTRA_STATE_KEY_SUFFIX
    return name.rpartition(".")[2] == suffix


def model_values(stored: Reader) -> dict[str, Any]:
    """Return the values of a stored model by name."""
    held = stored.state
    if isinstance(held, Mapping) and len(held) == 1:
        ((name, inner),) = held.items()
        held = inner if isinstance(inner, Mapping) and not is_extra(str(name)) else held
    values: dict[str, Any] = {}

    def add(nested: Mapping[str, Any], prefix: str) -> None:
        for key, value in nested.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping) and not is_extra(name):
                add(value, f"{name}.")
            else:
                values[name] = value

    add(held, "")
    return values


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
    stored: Reader,
    ties: Callable[[], Sequence[Sequence[str]]] = list,
    strict: bool = True,
    elsewhere: Collection[str] = (),
    fill: list[Plan] | None = None,
) -> dict[str, Any]:
    """Read a model's state into new memory, each rank its shards; nothing else changes.

    Names of the model that are `elsewhere`, on other stages of a pipeline, are not unexpected. With `fill`, which takes the plan that
    reads over them, the model's own shards are in the state where that is possible.

    Not a collective.
    """
    values, missing, others = matched(own.values, model_values(stored), ties, {*stored.aliases, *elsewhere})
    refuse_misfit(stored.origin, "the model", misfits(own.values, values, *((missing, others) if strict else ())))
    sharded = {
        name: value
        for name, value in values.items()
        if isinstance(value, StoredTensor) and is_distributed_tensor(own.values[name]) and not is_extra(name)
    }
    memory = {name: own.values[name] for name in sharded}
    if fill is None or not all(map(state.is_plain_on_host, memory.values())):
        fill = None
        memory = {name: state.empty_on_host_like(tensor, sharded[name].dtype) for name, tensor in memory.items()}
    plan = stored.plan([(value, memory[name]) for name, value in sharded.items()])
    if fill is None:
        plan()
    else:
        fill.append(plan)
    rest: dict[str, Any] = stored.read({name: value for name, value in values.items() if name not in memory})
    return values | rest | memory


def misfits(
    own: Mapping[str, Any], found: Mapping[str, Any], missing: Sequence[str] = (), others: Sequence[str] = ()
) -> list[str]:
    """Return a line for each way in which stored values, as `matched` returns them, are not what a model has."""
    lines = []
    for name, value in found.items():
        if nn.parameter.is_lazy(own[name]):
            continue
        stored_shape = tuple(value.shape) if isinstance(value, _TENSORS) else "no tensor"
        own_shape = tuple(own[name].shape) if isinstance(own[name], _TENSORS) else "no tensor"
        if stored_shape != own_shape and not is_extra(name):
            lines.append(f"{name} has {stored_shape} in the file and {own_shape} in the model")
    lines += [f"{name} is missing in the file" for name in missing]
    return lines + [f"{name} is unexpected in the file" for name in others]


def refuse_misfit(origin: str, model: str, problems: Sequence[str], more: str = "") -> None:
    """Raise RuntimeError if weights do not fit a model: `problems` has a line for each difference."""
    if problems:
        lines = "\n  ".join(manifest.first_of(problems))
        advice = f"Build the model as it was when the checkpoint was saved{more}."
        raise RuntimeError(f"The weights in {origin} do not fit {model}; nothing was loaded.\n  {lines}\n{advice}")


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


def write(values: dict[str, Any], plan: SavePlan, kind: Kind, index: int = 0, layout: Layout = "sharded") -> None:
    """Put a state into a plan: as shards, or gathered on rank 0.

    Collective: call on every rank.
    """
    shards, file = usual_names(kind, index)
    if layout == "full":
        values = state.gathered(values)
    plain_data.refuse_unreadable({f"{kind} {index}": values}, ignores_tensors=True)
    if layout == "sharded":
        plan.add_shards(shards, {kind: values})
    elif state.rank_and_size()[0] == 0:
        plan.add_object(file, values)


def read_for_model(
    model: nn.Module,
    folder: Path,
    index: int = 0,
    prefer: Layout | None = None,
    strict: bool = True,
    fill: list[Plan] | None = None,
    **getter: Any,
) -> tuple[dict[str, Any], ModelState]:
    """Read a model's state, whatever wrote it, into new memory; return it and the model's own, as `apply_model` takes them.

    `fill` is as `read_model` takes it. An error is raised only where it happens. Collective: call on every rank.
    """

    def opened() -> Reader:
        return required(folder, "model", index, prefer).open()

    model_io = io_of(model)
    stored = run_on_all_ranks(opened) if model_io.is_collective else opened()
    own = model_io.model_state(model, **getter)
    fill = None if model_io.gives_copies or model_io.is_collective or not stored.holds_files else fill
    ties, elsewhere = partial(model_io.tied_names, model), model_io.elsewhere(model)
    return read_model(own, stored, ties, strict, elsewhere, fill), own


# -- reading into unsharded models -------------------------------------------------------------------------------------


def read_full_model(
    model: nn.Module,
    folder: Path,
    index: int = 0,
    map_location: Any = "cpu",
    load_kwargs: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
) -> Change:
    """Return what gives a model, which is out of its wrappers, its weights, in whatever layout they are.

    Names match whatever wrappers wrote them, and tied weights that the file has once are filled in. FileNotFoundError without
    weights; RuntimeError lists what differs. `model_options` are those of the model's ``load_state_dict``.

    Not a collective.
    """
    options = dict(model_options or {})
    found = required(folder, "model", index, "full", type(model).__name__)
    stored, own = found.open(load_kwargs), model.state_dict()

    def ties() -> list[list[str]]:
        groups = shared_tensor_names(own)
        return [[name for name in group if own[name].shape == own[group[0]].shape] for group in groups]

    stored_values = model_values(stored)
    values, missing, others = matched(own, stored_values, ties, stored.aliases)
    by_name = loads_by_name(model)
    problems = misfits(own, values, *((missing, others) if options.get("strict", True) and by_name else ()))
    more = ", or load with strict=False, which accepts other names"
    refuse_misfit(os.path.join(found.folder.path, found.name), type(model).__name__, problems, more)
    is_plain = by_name and options.keys() <= {"strict"}
    if is_plain and (pairs := _own_tensors(model, values)) is not None:
        return Change(stored.plan(pairs))
    others_too = values | {name: stored_values[name] for name in others}  # hooks of the model may rename them
    state = stored.read(others_too)
    return model_change(model, to_device(state, map_location), options)


def to_device(state: dict[str, Any], device: Any) -> dict[str, Any]:
    """Return a state with its tensors on a device; where that is the CPU, the state itself."""
    if str(device) == "cpu":
        return state
    moved: dict[str, Any] = mapped_leaves(state, lambda tensor: tensor.to(device), torch.Tensor)
    return moved


def _own_tensors(model: nn.Module, values: Mapping[str, Any]) -> list[tuple[StoredTensor, torch.Tensor]] | None:
    """Return stored tensors with the model's own of the same names; None if any is not a plain tensor."""
    if "load_state_dict" in vars(model):
        return None
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    own, pairs = {}, []
    for name, tensor in tensors:
        if nn.parameter.is_lazy(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        own[name] = tensor.detach()
    for name, value in values.items():
        if not isinstance(value, StoredTensor) or type(own.get(name)) is not torch.Tensor:
            return None
        pairs.append((value, own[name]))
    return pairs
