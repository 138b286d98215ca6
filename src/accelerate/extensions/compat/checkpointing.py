"""Saving and loading the state of a run, given the objects themselves; ``Accelerator.save_state`` builds on it.

The folder has the layout of Hugging Face Accelerate, file by file, so that checkpoints are read in both directions.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from accelerate.base import _lazy
from accelerate.base._warn import warn_user
from accelerate.base.constants import (  # noqa: F401  their recorded place
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
from accelerate.checkpoint import apply, layouts, plain_data, read
from accelerate.checkpoint import save as saving
from accelerate.checkpoint.manifest import custom_file, model_file, optimizer_file
from accelerate.checkpoint.state import Common
from accelerate.checkpoint.torch_files import load as load  # a name of upstream's module
from accelerate.checkpoint.torch_files import save as save
from accelerate.checkpoint.verify import with_manifest
from accelerate.logging import get_logger
from accelerate.modules.unwrap import extract_model_from_parallel
from accelerate.process import PartialState

__getattr__ = _lazy.aliases("accelerate.checkpointing")

logger = get_logger("accelerate.checkpointing")

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

    Every rank calls it. The main process writes the shared files, and each rank its random states. No rank waits for
    another: ``Accelerator.save_state`` does that.

    Not a collective.

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
    plan = saving.SavePlan(os.fspath(output_dir), writes_shared=_writes_shared(save_on_each_node))
    for index, state in enumerate(model_states):
        saving.add_model(state, plan, index, safe_serialization)
    for index, obj in enumerate(optimizers):
        saving.add_optimizer(obj.state_dict(), plan, index)
    common = Common(schedulers, dataloaders, [], scaler, process_index, PartialState().device)
    saving.add_common(common, plan, step)
    plan.write()
    for index in range(len(model_states) if plan.writes_shared else 0):
        # Of an earlier save in the other format; a reader would not know which of the two is newer.
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(output_dir, model_file(index, not safe_serialization)))
    return Path(output_dir)


def _writes_shared(save_on_each_node: bool) -> bool:
    state = PartialState()
    return state.is_local_main_process if save_on_each_node else state.is_main_process


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
    """Give objects the state that ``save_accelerator_state`` wrote.

    All data is read and checked before anything is changed.

    Call it on every rank; no rank waits for another.

    Not a collective.

    Args:
        input_dir: The folder.
        models: In the order in which they were saved, as are the lists that follow.
        optimizers: The optimizers.
        schedulers: The learning rate schedulers.
        dataloaders: Prepared loaders.
        process_index: This rank.
        scaler: The gradient scaler, if the loss is scaled.
        map_location: The device of the tensors read: ``"cpu"`` (the default) or ``"on_device"``.
        load_kwargs: Passed to ``torch.load``.
        **load_model_func_kwargs: Passed to ``load_state_dict`` of the models, such as ``strict=False``.

    Returns:
        Attributes that the Accelerator takes over: ``step``, if the checkpoint has it.

    Raises:
        FileNotFoundError: The folder lacks a file; the message names it.
        RuntimeError: Weights do not fit their model; the message lists names and shapes.
        TypeError: ``map_location`` is something else.
    """
    common = Common(schedulers, dataloaders, [], scaler, process_index, PartialState().device)
    options = {"map_location": read.tensor_device(map_location, common.device), "load_kwargs": load_kwargs}
    folder = with_manifest(input_dir)
    model_changes = [
        layouts.read_full_model(inner, folder, index, model_options=load_model_func_kwargs, **options)
        for index, inner in enumerate(extract_model_from_parallel(model, keep_torch_compile=False) for model in models)
    ]
    contents = apply.Contents(folder, common)
    read.read_common(contents, load_kwargs)
    for index, optimizer in enumerate(optimizers):
        file = optimizer_file(index)
        state = read.read_file(folder, file, f"optimizer {index}", **options)
        contents.changes.append(apply.optimizer_change(optimizer, state, file))
    contents.changes += model_changes
    try:
        contents.begin()
        contents.complete()
    finally:
        contents.undo()
    for line in contents.changed_schedules:
        warn_user(f"{os.fspath(input_dir)}: {line}")
    return contents.attributes


def save_custom_state(obj: Any, path: Folder, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of an object to ``custom_checkpoint_{index}.pkl``.

    Collective: call on every rank, one process writes.

    Args:
        obj: An object with ``state_dict``.
        path: The folder.
        index: The object's number.
        save_on_each_node: Write on the main process of each node.
    """
    state = obj.state_dict()
    plain_data.refuse_unreadable({f"{type(obj).__name__} ({custom_file(index)})": state})
    if _writes_shared(save_on_each_node):
        plan = saving.SavePlan(os.fspath(path))
        plan.add_object(custom_file(index), state)
        plan.write()


def load_custom_state(obj: Any, path: Folder, index: int = 0) -> None:
    """Give an object the state in ``custom_checkpoint_{index}.pkl``.

    Not a collective.

    Args:
        obj: An object with ``load_state_dict``.
        path: The folder.
        index: The object's number.

    Raises:
        FileNotFoundError: The folder has no state of this number.
    """
    obj.load_state_dict(read.read_file(path, custom_file(index), f"registered object {index}"))
