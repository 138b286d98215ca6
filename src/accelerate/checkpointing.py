"""Saving and loading the state of a run, given the objects themselves; ``Accelerator.save_state`` builds on it.

The folder has the layout of Hugging Face Accelerate, file by file, so that checkpoints are read in both directions.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from accelerate.checkpoint import load, names
from accelerate.checkpoint.save import SavePlan
from accelerate.data import resume, rng
from accelerate.data.loader import PreparedLoader
from accelerate.modules.unwrap import extract_model_from_parallel
from accelerate.process import PartialState
from accelerate.utils.constants import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAFE_WEIGHTS_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    WEIGHTS_NAME,
)

__all__ = [
    "MODEL_NAME",
    "OPTIMIZER_NAME",
    "RNG_STATE_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "WEIGHTS_NAME",
    "load_accelerator_state",
    "load_custom_state",
    "save_accelerator_state",
    "save_custom_state",
]

Folder = str | os.PathLike[str]


def save_accelerator_state(
    output_dir: Folder,
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write models, optimizers, schedulers, loaders, scaler and random states into a folder.

    Every rank calls it. The main process writes the shared files, and each rank its random states. Nobody waits for
    anybody: ``Accelerator.save_state`` does that.

    Args:
        output_dir: The folder. It is made when it is missing.
        model_states: State dicts of the models.
        optimizers: Objects with ``state_dict``, as are the schedulers.
        schedulers: The learning rate schedulers.
        dataloaders: Prepared loaders.
        process_index: This rank.
        step: Step count to remember.
        scaler: The gradient scaler, if the loss is scaled.
        save_on_each_node: Write the shared files on the main process of each node.
        safe_serialization: Write models as safetensors instead of torch's pickle format.

    Returns:
        The folder.
    """
    os.makedirs(output_dir, exist_ok=True)
    for index, state in enumerate(model_states):
        load.write_model(state, output_dir, index, safe_serialization, save_on_each_node)
    shared = {names.optimizer_file(index): obj.state_dict() for index, obj in enumerate(optimizers)}
    shared |= {names.scheduler_file(index): obj.state_dict() for index, obj in enumerate(schedulers)}
    if scaler is not None:
        shared[names.scaler_file()] = scaler.state_dict()
    inner = [load.unwrapped(loader) for loader in dataloaders]
    # Ranks stand at different places of their data. Other readers look only for the keys that they know.
    positions = [resume.capture(loader) if isinstance(loader, PreparedLoader) else None for loader in inner]
    with load.planned(output_dir) as plan:
        if load.writes(save_on_each_node):
            for file, state in shared.items():
                plan.add_object(file, state)
        for index, loader in enumerate(inner):
            if load.keeps_state(loader):
                _write_loader(loader, plan, index, process_index, save_on_each_node)
        generators = rng.collect()
        if plan is output_dir:
            # Beside the file that upstream reads. It also tells that a manifest belongs to the folder.
            tensors, metadata = rng.encode(generators)
            plan.add_tensors(names.generators_file(process_index), tensors, metadata=metadata)
        own = {"step": step, **generators, load.POSITIONS: positions}
        plan.add_object(names.random_states_file(process_index), own)
    return Path(output_dir)


def _write_loader(loader: Any, plan: SavePlan, index: int, process_index: int, save_on_each_node: bool) -> None:
    """Write what a stateful loader (torchdata's) says of itself, in the format that upstream has."""
    state = {name: value for name, value in loader.state_dict().items() if name != resume.KEY}
    # The writer of shared files leaves its state under the plain name, which is the only one that others read.
    rank = None if load.writes(save_on_each_node) else process_index
    plan.add_object(names.dataloader_file(index, rank), state)


def load_accelerator_state(
    input_dir: Folder,
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any | None = None,
    map_location: str | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Give objects the state that ``save_accelerator_state`` wrote. Every rank calls it; none waits for another.

    Everything is read and checked before anything is changed.

    Args:
        input_dir: The folder.
        models: In the order in which they were saved, as are the lists that follow.
        optimizers: The optimizers.
        schedulers: The learning rate schedulers.
        dataloaders: Prepared loaders.
        process_index: This rank.
        scaler: The gradient scaler, if the loss is scaled.
        map_location: Where tensors are read to: ``"cpu"`` (the default) or ``"on_device"``.
        load_kwargs: Passed to ``torch.load``.
        **load_model_func_kwargs: Passed to ``load_state_dict`` of the models, such as ``strict=False``.

    Returns:
        Attributes for the Accelerator to take over: ``step``, when the checkpoint has it.

    Raises:
        FileNotFoundError: The folder lacks a file; the message names it.
        RuntimeError: Weights do not fit their model; the message lists names and shapes.
        TypeError: ``map_location`` is something else.
    """
    location = resolve_map_location(map_location)
    strict = load_model_func_kwargs.get("strict", True)
    states = [
        load.read_model(model, input_dir, index, location, strict, load_kwargs) for index, model in enumerate(models)
    ]
    contents = load.read_common(
        os.fspath(input_dir), list(schedulers), list(dataloaders), [], scaler, process_index, load_kwargs
    )
    contents.models = [
        (extract_model_from_parallel(model, keep_torch_compile=False), state)
        for model, state in zip(models, states, strict=True)
    ]
    contents.optimizers = [
        (optimizer, load.read_optimizer(input_dir, index, location, load_kwargs), names.optimizer_file(index))
        for index, optimizer in enumerate(optimizers)
    ]
    contents.begin(**load_model_func_kwargs)
    return contents.complete()


def resolve_map_location(map_location: str | None) -> Any:
    """Return the device that tensors are read to.

    Args:
        map_location: ``"cpu"``, ``"on_device"`` (this rank's device) or None, which is the CPU: loading copies from there.

    Raises:
        TypeError: It is something else.
    """
    if map_location in (None, "cpu"):
        return "cpu"
    if map_location == "on_device":
        return PartialState().device
    raise TypeError(f"map_location={map_location!r} is not supported; pass None, 'cpu' or 'on_device'.")


def save_custom_state(obj: Any, path: Folder, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of an object to ``custom_checkpoint_{index}.pkl``. All ranks call it, one process writes.

    Args:
        obj: An object with ``state_dict``.
        path: The folder.
        index: The object's number.
        save_on_each_node: Write on the main process of each node.
    """
    state = obj.state_dict()
    if load.writes(save_on_each_node):
        with load.planned(path) as plan:
            plan.add_object(names.custom_file(index), state)


def load_custom_state(obj: Any, path: Folder, index: int = 0) -> None:
    """Give an object the state in ``custom_checkpoint_{index}.pkl``. Any rank, alone.

    Args:
        obj: An object with ``load_state_dict``.
        path: The folder.
        index: The object's number.

    Raises:
        FileNotFoundError: The folder has no state of this number.
    """
    obj.load_state_dict(load.read_object(path, names.custom_file(index), f"registered object {index}"))
