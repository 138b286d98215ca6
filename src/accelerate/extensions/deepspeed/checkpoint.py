"""Checkpoints of engines: DeepSpeed's files are part of a save, and it loads files of as many ranks at the same stage.

Other checkpoints (other ranks, another stage, another strategy) are put into the engine here, each rank's part by the names
of parameters. In both cases names and shapes are compared before anything changes.

Source: https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from accelerate.base._warn import warn_user
from accelerate.checkpoint import layouts, optimizers, torch_files
from accelerate.checkpoint.apply import Change
from accelerate.checkpoint.layouts import Path, refuse_misfit
from accelerate.checkpoint.model_io import io_of, numbered, tied_again
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import Entries, Wanted
from accelerate.checkpoint.stored import Reader, StoredTensor
from accelerate.checkpoint.verify import with_manifest
from accelerate.extensions.deepspeed import zero
from accelerate.modules.unwrap import canonical_name
from accelerate.runtime import torch_private

_GATHER = "stage3_gather_16bit_weights_on_model_save"


def save(engine: Any, plan: SavePlan, index: int, **options: Any) -> None:
    """Let the engine put everything it has into a plan; `latest` and its scripts are written at once.

    Collective: call on every rank.
    """
    _check_disk_optimizer(engine)
    with _files_of(engine, plan):
        engine.save_checkpoint(plan.folder, zero.engine_folder(index), **options)


@contextlib.contextmanager
def _files_of(engine: Any, plan: SavePlan | None = None) -> Iterator[None]:
    """Let an engine save into a plan, and read files of plain data and DeepSpeed's records only."""
    before, engine.checkpoint_engine = engine.checkpoint_engine, _Files(engine.checkpoint_engine, plan)
    try:
        yield
    finally:
        engine.checkpoint_engine = before


class _Files:
    """Replaces an engine's `checkpoint_engine`, whose `load` would run code of a file."""

    def __init__(self, inner: Any, plan: SavePlan | None) -> None:
        self._inner, self._plan = inner, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def is_decoupled(self) -> bool:
        """No: a writer of the configuration, which ends when it likes, has nothing to write."""
        return False

    def save(self, state_dict: Any, path: str) -> None:
        """Put a state into the plan, which copies or writes it before the engine continues."""
        self._plan.add_object(os.path.relpath(path, self._plan), state_dict)  # type: ignore[union-attr]  # a save has one

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file; UnpicklingError for objects of other classes."""
        classes = {}
        for name in zero.CLASSES:
            module, _, kind = name.rpartition(".")
            classes[name] = getattr(importlib.import_module(module), kind)
        return torch_files.load(path, map_location, classes=classes)


# -- loading -----------------------------------------------------------------------------------------------------------


def read(
    engine: Any, folder: Path, index: int, optimizer: int, strict: bool = True, weights_only: bool = True
) -> Change:
    """Compare an engine with what a checkpoint has for it, and return what loads that. Not a collective; all ranks load.

    Args:
        engine: it stays as it is until the change is applied.
        folder: a checkpoint of any strategy.
        index: of the model.
        optimizer: index of the engine's optimizer.
        strict: the names must be the same.
        weights_only: run no code of a file.

    Raises:
        FileNotFoundError: there is no such model, or no state for the engine's optimizer.
        RuntimeError: names, shapes or groups differ.
    """
    return Change(_plan(engine, folder, index, optimizer, strict, weights_only))


def _check_disk_optimizer(engine: Any) -> None:
    """Refuse optimizers on a disk, whose step counts and small states DeepSpeed would not load again."""
    if engine.zero_nvme_offload_optimizer():
        raise RuntimeError(
            "zero_optimization.offload_optimizer.device is 'nvme', and DeepSpeed cannot resume from a checkpoint of such an optimizer; nothing was "
            "saved or loaded. Set it to 'cpu' (parameters may stay on nvme), or save only the weights with save_model."
        )


def _plan(engine: Any, folder: Path, index: int, optimizer: int, strict: bool, weights_only: bool) -> Any:
    """Return what loads a checkpoint into an engine, or raise. Not a collective."""
    _check_disk_optimizer(engine)
    stored_files = layouts.required(folder, "model", index, None)
    written = None
    if stored_files.layout == "zero":
        load = partial(_native, engine, folder, stored_files.name, weights_only)
        checkpoint = with_manifest(folder)
        if engine.has_moe_layers:
            # What DeepSpeed reads of it is not known here.
            checkpoint.check(filter(stored_files.has, checkpoint.listing.files), shared=True)
            return partial(load, strict)
        written = zero.Folder(os.path.join(folder, stored_files.name), weights_only, checkpoint)
    model = stored_files.open() if written is None else written.model()
    values = _matched(engine, model, strict, written)
    is_same_layout = _same_layout(engine, written, os.path.join(folder, stored_files.name))
    trains = engine.basic_optimizer is not None
    if (
        written is not None
        and is_same_layout
        and trains
        and (written.shards or not isinstance(engine.optimizer, torch.optim.Optimizer))
    ):
        written.open_own(engine.global_rank)
        return partial(load, strict and len(values) == len(_shapes(engine)))
    idle = [parameter for parameter in engine.module.parameters() if not (trains and parameter.requires_grad)]
    if any(getattr(getattr(parameter, "ds_tensor", None), "final_location", None) == "nvme" for parameter in idle):
        raise RuntimeError(
            "zero_optimization.offload_param.device is 'nvme', and weights that do not train cannot be loaded there; nothing was loaded. Set it to 'cpu'."
        )
    saved: _Optimizer | None = None
    if trains:
        _check_flat(engine)
        stored_files = layouts.required(folder, "optimizer", optimizer, None)
        states = stored_files.open() if written is None else written.optimizer()
        goal = optimizers.Target(_groups(engine), {}, {}, partial(io_of(engine.module).tied_names, engine.module))
        raw, _ = optimizers.matched(goal, states, stored_files)
        saved = _Optimizer(states, raw["state"], raw["param_groups"])
    return partial(_put, engine, model, values, saved, written)


def _matched(engine: Any, stored: Reader, strict: bool, written: zero.Folder | None) -> dict[str, Any]:
    """Return the stored values by the engine's names, not read; refuse other names and shapes."""
    shapes = _shapes(engine)
    values, missing, others = layouts.matched(
        shapes, layouts.model_values(stored), partial(io_of(engine.module).tied_names, engine.module), stored.aliases
    )
    # Values skipped by `exclude_frozen_parameters` do not change.
    frozen = {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}
    optional = frozen if written is not None and written.head["frozen_param_shapes"] is None else set()
    problems = [
        f"{name} has {tuple(values[name].shape)} in the checkpoint and {tuple(shape)} in the engine"
        for name, shape in shapes.items()
        if name in values and values[name].shape != shape
    ]
    if strict:
        problems += [f"{name} is missing in the checkpoint" for name in missing if name not in optional]
        problems += [f"{name} is unexpected in the checkpoint" for name in others]
    refuse_misfit(stored.origin, type(engine.module).__name__, problems)
    return values


def _shapes(engine: Any) -> dict[str, torch.Size]:
    """Return the shapes of an engine's weights and buffers by the names of its state dict."""
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    return {
        name: getattr(parameters.get(name), "ds_shape", value.shape)
        for name, value in engine.module.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def _same_layout(engine: Any, written: zero.Folder | None, place: str) -> bool:
    """Return whether an engine of this stage, precision and number of ranks wrote a folder, with its parameters in this order."""
    if written is None or bool(written.shards) is not bool(engine.zero_optimization()):
        return False
    if not written.shards or engine.basic_optimizer is None:
        return not written.shards
    if getattr(engine.optimizer, "params_in_nvme_and_cpu", False):
        return False  # DeepSpeed writes such a checkpoint, and fails to load it
    name = f"{'bf16_' * engine.bfloat16_enabled()}zero_pp_rank_{engine.global_rank}_mp_rank_00_optim_states.pt"
    return (
        os.path.exists(os.path.join(place, name))
        and len(written.shards) == engine.seq_dp_world_size
        and written.splits_weights is (engine.zero_optimization_stage() == 3)
        and list(map(list, written.groups)) == [list(group) for group in engine._get_zero_param_shapes()]
    )


def _native(engine: Any, folder: Path, tag: str, weights_only: bool, strict: bool) -> None:
    """Let an engine load what it has written. Collective: call on every rank."""
    with _files_of(engine) if weights_only else contextlib.nullcontext():
        engine.load_checkpoint(os.fspath(folder), tag, load_module_strict=strict)


# -- putting another layout into an engine -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Optimizer:
    """A stored optimizer under the engine's names, in its groups, not read."""

    stored: Reader
    states: Mapping[str, Any]
    groups: list[dict[str, Any]]


@dataclass(frozen=True)
class _Flat:
    """A flat float32 tensor of this rank: its group, and for each name where a part begins in it and in the parameter, and its length."""

    tensor: torch.Tensor
    group: int
    parts: list[tuple[str, int, int, int]]


def _check_flat(engine: Any) -> None:
    """Refuse engines whose optimizer's memory is not to be had."""
    inner, stage = engine.optimizer, engine.zero_optimization_stage()
    fits = stage == 3 or hasattr(inner, "single_partition_of_fp32_groups")
    if stage == 0:
        fits = isinstance(inner, torch.optim.Optimizer)
    if not fits:
        raise RuntimeError(
            f"This engine (stage {stage}, {type(inner).__name__}) loads only what as many ranks saved with the same configuration; nothing was "
            "loaded. Load it in float32 at stage 0, or at another stage."
        )


def _groups(engine: Any) -> list[list[str]]:
    """Return the names of the optimizer's parameters in each group."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return io_of(engine.module).parameter_names(engine.optimizer, engine.module)
    groups: list[list[str]] = [[] for _ in engine.optimizer.optimizer.param_groups]
    for number, shapes in enumerate(engine._get_zero_param_shapes()):
        groups[engine.optimizer.sub_group_to_group_id[number] if stage == 3 else number] += map(canonical_name, shapes)
    return groups


def _flats(engine: Any) -> Iterator[_Flat]:
    """Yield the float32 weights that this rank has of an engine from stage 1 on."""
    inner, names = engine.optimizer, engine.param_names
    if engine.zero_optimization_stage() < 3:
        for number, (flat, group) in enumerate(
            zip(inner.single_partition_of_fp32_groups, inner.bit16_groups, strict=True)
        ):
            linked = [(canonical_name(names[p]), p._hp_mapping) for p in group if p._hp_mapping is not None]
            parts = [
                (n, m.hp_fragment_address.start, m.lp_fragment_address.start, m.lp_fragment_address.numel)
                for n, m in linked
            ]
            yield _Flat(flat, number, parts)
        return
    for number, group in enumerate(inner.fp16_groups):
        parts, offset = [], 0
        for p in group:
            start, count, length = _part(engine, p)
            parts.append((canonical_name(names[p]), offset, start, count))
            offset += length
        yield _Flat(inner.fp32_partitioned_groups_flat[number], inner.sub_group_to_group_id[number], parts)


def _part(engine: Any, parameter: Any) -> tuple[int, int, int]:
    """Return which part of a parameter this rank has at stage 3."""
    group = parameter.ds_process_group
    return zero.part_of(parameter.ds_numel, torch.distributed.get_rank(group), torch.distributed.get_world_size(group))


@torch.no_grad()
def _put(
    engine: Any,
    model: Reader,
    values: dict[str, Any],
    optimizer: _Optimizer | None,
    written: zero.Folder | None,
) -> None:
    """Put weights, and the state of an optimizer, into an engine; a tensor at a time is read.

    Collective: call on every rank.
    """
    inner, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        inner.checkpoint_event_prologue() if optimizer else inner.partition_all_parameters()
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    state = engine.module.state_dict()
    owned = {name for group in optimizer.groups for name in group["params"]} if optimizer and stage else set()
    canonical = {canonical_name(name): name for name in values}
    skipped = {id(parameters[canonical[name]]) for name in owned if name in canonical}
    for name, value in values.items():
        parameter: Any = parameters.get(name)
        if id(parameter) in skipped:
            continue
        if hasattr(parameter, "ds_tensor"):
            start, count, _ = _part(engine, parameter)
            parameter.ds_tensor[:count].copy_(model.elements(value, start, start + count))
        else:
            state[name].copy_(model.read(value))
    if optimizer and not stage:
        stored = {"state": optimizer.states, "param_groups": optimizer.groups}
        inner.load_state_dict(numbered(optimizer.stored.read(stored)))
    elif optimizer:
        for flat in _flats(engine):
            _fill(flat, model, lambda name: values[canonical[name]], flat.tensor)
            _put_states(flat, optimizer, inner.optimizer.state[flat.tensor])
        for group, stored in zip(inner.optimizer.param_groups, optimizer.groups, strict=True):
            group.update({key: value for key, value in stored.items() if key != "params"})
        if stage == 3:
            for number in range(len(inner.fp16_groups)):
                inner._reassign_or_swap_out_partitioned_parameters(number)
        else:
            inner.update_lp_params()
    if stage == 3 and optimizer:
        inner.checkpoint_event_epilogue()
    if written is not None:
        _put_counts(engine, written)


def _fill(flat: _Flat, stored: Reader, value: Callable[[str], Any], target: torch.Tensor) -> None:
    """Read this rank's parts of what has the value of each name."""
    for name, offset, start, count in flat.parts:
        target[offset : offset + count].copy_(stored.elements(value(name), start, start + count))


def _put_states(flat: _Flat, optimizer: _Optimizer, kept: dict[str, Any]) -> None:
    """Put the states of a flat tensor's parameters into the optimizer's one state of it."""
    names = [name for name, *_ in flat.parts] or optimizer.groups[flat.group]["params"]
    first: Mapping[str, Any] = next((optimizer.states[name] for name in names if name in optimizer.states), {})
    for key, value in first.items():
        if not isinstance(value, StoredTensor) or not value.shape:
            kept[key] = optimizer.stored.read(value)
            continue
        if not isinstance(kept.get(key), torch.Tensor):
            kept[key] = torch.zeros_like(flat.tensor)
        _fill(flat, optimizer.stored, partial(_state_of, optimizer, key), kept[key])


def _state_of(optimizer: _Optimizer, key: str, name: str) -> Any:
    return optimizer.states[name][key]


def _put_counts(engine: Any, written: zero.Folder) -> None:
    """Let an engine count its steps from the count of another one; its scale of losses and its own schedule, too."""
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, written.head[name])
    if engine.lr_scheduler is not None and written.head["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(written.model().read(written.head["lr_scheduler"]))
        _keep_length(engine.lr_scheduler, written.head, engine.dp_world_size)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    saved = written.shards[0].get("loss_scaler") if written.shards else None
    if scaler is not None and saved is not None and vars(scaler).keys() == vars(saved).keys():
        vars(scaler).update(vars(saved))


def _keep_length(schedule: Any, head: Mapping[str, Any], ranks: int) -> None:
    """Give a schedule of DeepSpeed the total that its steps were counted for, which its state does not hold, on other ranks."""
    parameters = ((head.get("ds_config") or {}).get("scheduler") or {}).get("params") or {}
    total, current_total = parameters.get("total_num_steps"), getattr(schedule, "total_num_steps", None)
    saved_ranks = head.get("dp_world_size")
    if saved_ranks in (None, ranks) or current_total is None or current_total == total:
        return
    saved = f"{type(schedule).__name__} was saved on {saved_ranks} data-parallel ranks"
    if not isinstance(total, int):  # a schedule that the program built
        warn_user(
            f"{saved}, and has total_num_steps={current_total} on {ranks}. The checkpoint does not hold the former total, so its learning rate may "
            "differ from the uninterrupted run's. Build it with the total_num_steps of the run that saved it."
        )
        return
    schedule.total_num_steps = total
    warn_user(
        f"{saved} with total_num_steps={total}, and has {current_total} on {ranks}: {total} is used, as in an uninterrupted run. To change the "
        "length, set total_num_steps of the schedule after load_state."
    )


# -- weights only ------------------------------------------------------------------------------------------------------


def require_gathering(engine: Any, config: dict[str, Any]) -> None:
    """Refuse (ValueError) to gather the full model of stage 3 if that is switched off."""
    if engine.zero_optimization_stage() == 3 and not config.get("zero_optimization", {}).get(_GATHER):
        raise ValueError(
            f"The full weights of ZeRO stage 3 are gathered only where zero_optimization.{_GATHER} is true. Set it (or "
            "zero3_save_16bit_model=True of DeepSpeedPlugin), or save shards with save_state and merge them with zero_to_fp32.py."
        )


def entries(engine: Any, is_selected: Wanted) -> Entries:
    """Yield the wanted entries of the state dict of a stage-3 engine's module, gathered a module at a time.

    Collective: call on every rank.
    """
    import deepspeed

    again = tied_again(engine)
    for prefix, module in engine.module.named_modules():
        if names := [
            name for name in torch_private.own_state(module, prefix) if is_selected(name) and name not in again
        ]:
            with deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=None):
                state = torch_private.own_state(module, prefix)
                yield from [(name, state[name]) for name in names]
