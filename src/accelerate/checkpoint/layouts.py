"""Checkpoints of another layout, for strategies that keep whole models: read whole, wherever the shards lie.

What a strategy that shards has written is there as folders of shards, or as a file per rank; see `checkpoint.fsdp_files`. A whole
model reads the whole of it. The names of parameters connect the two, as the numbers in an optimizer's state do not.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint import files, fsdp_files, fsdp_optimizer, fsdp_state, names
from accelerate.checkpoint.plan import SavePlan
from accelerate.modules.unwrap import extract_model_from_parallel

Path = str | os.PathLike[str]


def read_model(model: nn.Module, folder: Path, index: int = 0, **options: Any) -> dict[str, Any]:
    """Read a model's weights under the names that the model has, in whatever layout they were written. Any rank, alone.

    Args:
        model: The model, wrapped or not; it is not changed.
        folder: The checkpoint's folder.
        index: Which of the models it is, from 0.
        **options: Of `files.read_model`.

    Returns:
        A state dict for ``load_state_dict`` of the module inside.

    Raises:
        FileNotFoundError: The folder has no weights for this model.
        RuntimeError: Names or shapes differ; the message lists them.
        DamagedCheckpoint: The shards are damaged.
    """
    whole = (names.model_file(index), names.model_file(index, safe_serialization=False))
    if not any(os.path.exists(os.path.join(folder, name)) for name in whole):
        found = fsdp_files.find(folder, "model", index)
        if found is not None and found.layout != "local":
            inner = extract_model_from_parallel(model, keep_torch_compile=False)
            weights = fsdp_files.merged_model(found.reader())
            return files.fit_to_model(inner, weights, f"{os.fspath(folder)}/{found.name}", options.get("strict", True))
    return files.read_model(model, folder, index, **options)


def read_optimizer(
    optimizer: Any, models: Iterable[nn.Module], folder: Path, index: int = 0, **options: Any
) -> Mapping[str, Any]:
    """Read an optimizer's state with the numbers that the optimizer has, in whatever layout it was written. Any rank, alone.

    Args:
        optimizer: Wrapped or not; it is not changed.
        models: The models of the run; one of them has the optimizer's parameters.
        folder: The checkpoint's folder.
        index: Which of the optimizers it is, from 0.
        **options: Of `files.read_optimizer`.

    Raises:
        FileNotFoundError: The folder has no state for this optimizer.
        RuntimeError: It is the state of other parameters; the message tells which.
        DamagedCheckpoint: The shards are damaged.
    """
    if os.path.exists(os.path.join(folder, names.optimizer_file(index))):
        raw = files.read_optimizer(folder, index, **options)
        return _by_name(raw, optimizer, models, folder, index) if fsdp_optimizer.is_state(raw) else raw
    found = fsdp_files.find(folder, "optimizer", index)
    goal = _target(optimizer, models) if found is not None and found.layout == "sharded" else None
    if found is not None and goal is not None:
        return fsdp_state.numbered(fsdp_optimizer.read(goal, found))
    return files.read_optimizer(folder, index, **options)


def _target(optimizer: Any, models: Iterable[nn.Module]) -> fsdp_optimizer.Target | None:
    for model in models:
        with contextlib.suppress(ValueError):  # its parameters are another model's
            return fsdp_optimizer.target(optimizer, model)
    return None


def _by_name(
    raw: Mapping[str, Any], optimizer: Any, models: Iterable[nn.Module], folder: Path, index: int
) -> Mapping[str, Any]:
    """Return a whole state with the numbers that the optimizer has, by the names of parameters wherever those are known."""
    groups = raw["param_groups"]
    keyed = [name for group in groups for name in group["params"]]
    named = any(isinstance(name, str) for name in keyed)
    goal = _target(optimizer, models)
    if goal is None:
        if named:
            raise RuntimeError(
                f"{names.optimizer_file(index)} in {os.fspath(folder)!r} has the names of parameters, but no model that was "
                "prepared has all parameters of this optimizer, so they have no names here. Prepare the model, too."
            )
        return raw
    own = goal.parameters_in_groups()
    told = None if named else fsdp_optimizer.told_names(os.fspath(folder), index, groups, own)
    sizes = [len(group["params"]) for group in groups], [len(group) for group in goal.groups]
    if not named and (told is None or (told == own and sizes[0] == sizes[1])):
        return raw
    where = os.path.join(os.fspath(folder), names.optimizer_file(index))
    return fsdp_state.numbered(fsdp_optimizer.arranged(goal, raw, where, told))


def write_parameter_names(
    optimizers: Iterable[torch.optim.Optimizer], models: Iterable[nn.Module], plan: SavePlan, save_on_each_node: bool
) -> None:
    """Write which parameters the numbers in the optimizers' files mean. All ranks call it, one process writes.

    Args:
        optimizers: Those of the run, in order.
        models: The models of the run.
        plan: Takes the file.
        save_on_each_node: Each node has a folder of its own.
    """
    if not files.writes(save_on_each_node):
        return
    models = list(models)
    told = {index: fsdp_state.names_among(optimizer, models) for index, optimizer in enumerate(optimizers)}
    told = {index: groups for index, groups in told.items() if groups is not None}
    if told:
        plan.add_bytes(fsdp_files.NAMES_FILE, fsdp_files.names_text(told))
