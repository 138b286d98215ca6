"""Where the weights of a model's offloaded modules are kept: gathering them, and checking that none is missing."""

import logging
import os
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.offload.bnb_parameters import FOUR_BIT
from accelerate.offload.disk import OffloadedWeightsLoader, extract_submodules_state_dict
from accelerate.offload.placement import Device
from accelerate.offload.sources import listed
from accelerate.offload.tied import device_of
from accelerate.offload.writer import INDEX_NAME, Folder, OffloadWriter, checksum, read_index, tensor_bytes

logger = logging.getLogger("accelerate.big_modeling")


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer of a model by every name it has.

    Args:
        model: The model.
    """
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model without the extra state that modules keep in other forms, which stays with them.

    Args:
        model: The model.
    """
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def gather_weights(
    model: nn.Module,
    on_cpu: Sequence[str],
    on_disk: Sequence[str],
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: Folder | None,
    offload_index: Mapping[str, dict] | None,
    offload_buffers: bool,
) -> OffloadedWeightsLoader | None:
    """Return where hooks read offloaded weights from; what goes to disk and is not there yet is written.

    Args:
        model: The model; its tensors stay as they are.
        on_cpu: Modules whose weights wait in host memory.
        on_disk: Modules whose weights wait on disk.
        state_dict: The weights of ``on_cpu``. None: the model's.
        offload_dir: Folder for ``on_disk``.
        offload_index: Where weights on disk are; then nothing is written.
        offload_buffers: Whether buffers are offloaded too.

    Returns:
        The weights; None if nothing is offloaded.

    Raises:
        FileNotFoundError: The index names a file that is not there.
        OSError: The disk is full; then nothing is left behind.
        ValueError: There is no place for weights on disk, or what is there does not fit the model.
    """
    checked = False
    if state_dict is None and on_cpu:
        state_dict = extract_submodules_state_dict(state_tensors(model), on_cpu)
    if on_disk and offload_index is None:
        if offload_dir is None:
            raise ValueError(
                f"The device_map sends {listed(map(repr, on_disk))} to the disk: give an `offload_dir` to put them in, or the "
                "`offload_index` of where they are."
            )
        offload_index = write_missing(model, on_disk, offload_buffers, offload_dir)
        checked = True
    if state_dict is None and not on_disk:
        return None
    in_memory = {name: tensor.to("cpu") for name, tensor in (state_dict or {}).items() if tensor.device.type != "meta"}
    weights = OffloadedWeightsLoader(in_memory, offload_dir if on_disk else None, offload_index)
    if on_disk and not checked:
        check_stored(weights, extract_submodules_state_dict(all_tensors(model), on_disk))
    return weights


def write_missing(
    model: nn.Module, modules: Sequence[str], offload_buffers: bool, folder: Folder
) -> dict[str, dict[str, Any]]:
    """Write the weights that a folder's index does not have yet, and return the index of all of them.

    What the folder has is used as it is. If it differs from the model's weights, a warning says so.

    Args:
        model: The model; tensors on the meta device are left out.
        modules: Names of the modules whose weights are needed.
        offload_buffers: Whether buffers are needed too.
        folder: The offload folder.

    Raises:
        FileNotFoundError: The index names a file that is not there.
        OSError: The disk is full; then nothing is left behind.
        ValueError: The folder's index is damaged, or what it has does not fit.
    """
    buffers = set() if offload_buffers else {name for name, _ in model.named_buffers(remove_duplicate=False)}
    wanted = extract_submodules_state_dict(state_tensors(model), modules)
    state_dict = {name: tensor for name, tensor in wanted.items() if name not in buffers}
    index = read_index(folder)
    check_stored(OffloadedWeightsLoader(save_folder=folder, index=index), state_dict)
    data = {name: tensor for name, tensor in state_dict.items() if tensor.device.type != "meta"}
    with OffloadWriter(folder) as writer:
        for name, tensor in data.items():
            if name not in index:
                writer.add(name, tensor)
    other = [
        name
        for name, tensor in data.items()
        if "xxh3" in index.get(name, ()) and index[name]["xxh3"] != checksum(tensor_bytes(tensor))
    ]
    if other:
        logger.warning(
            "The folder %s has an index of offloaded weights, which are used instead of the model's; they differ in %s. Use an "
            "empty folder to offload the model's own weights.",
            os.fspath(folder),
            listed(other, 3),
        )
    return {**index, **writer.index}


def check_stored(weights: OffloadedWeightsLoader, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that what an index says of a model's tensors is there and has their shapes. No weight is read.

    Args:
        weights: The weights.
        tensors: The tensors that are on disk by name.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is truncated, or a shape differs.
    """
    problems = []
    for name, tensor in tensors.items():
        if name not in weights.index or name in weights.state_dict:
            continue
        shape = weights.stored_shape(name)
        if tuple(shape) != tuple(tensor.shape) and type(tensor).__name__ not in FOUR_BIT:
            problems.append(f"{name} has shape {tuple(shape)}, the model {tuple(tensor.shape)}")
    if problems:
        source = (
            "offload_index" if weights.save_folder is None else f"{INDEX_NAME} of {os.fspath(weights.save_folder)}"
        )
        raise ValueError(
            f"The {source} does not belong to this model, which is left as it was: {listed(problems)}. Offload it to another "
            "folder, or delete this one."
        )


def name_tied_weights(weights: OffloadedWeightsLoader | None, tied: Sequence[Sequence[str]]) -> None:
    """Make a tied weight, which checkpoints hold under one name only, known under its other names.

    Args:
        weights: The offloaded weights.
        tied: Groups of names, as `find_tied_parameters` returned them.
    """
    for group in tied if weights is not None else ():
        known = next((name for name in group if name in weights), None)
        for name in group if known is not None else ():
            if name in weights:
                continue
            if known in weights.state_dict:
                weights.state_dict[name] = weights.state_dict[known]
            else:
                entry = weights.index[known]
                # An entry without a key of its own is found under its own name.
                own = {"weight_name": known} if entry.get("safetensors_file") is not None else {"dat_name": known}
                weights.index[name] = {**own, **entry}
            weights.all_keys.append(name)


def promised_weights(
    model: nn.Module,
    tied: Sequence[Sequence[str]],
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Mapping[str, dict] | None = None,
) -> set[str]:
    """Return the names of the weights that will be found once those in memory are offloaded. Nothing is written.

    Args:
        model: The model.
        tied: Groups of names that share one parameter.
        state_dict: Weights in memory beside the model's.
        offload_dir: An offload folder, whose index is read unless ``offload_index`` is given.
        offload_index: Where weights on disk are.
    """
    if offload_index is None:
        offload_index = {} if offload_dir is None else read_index(offload_dir)
    in_memory = [*state_tensors(model).items(), *(state_dict or {}).items()]
    found = {*offload_index, *(name for name, tensor in in_memory if tensor.device.type != "meta")}
    for group in tied:
        if not found.isdisjoint(group):
            found.update(group)
    return found


def check_data(
    model: nn.Module,
    device_map: Mapping[str, Device],
    offloaded_to: set[str],
    weights: Container[str],
    tied: Sequence[Sequence[str]],
    offload_buffers: bool,
) -> None:
    """Check before a model is dispatched that each of its tensors has data somewhere.

    Args:
        model: The model.
        device_map: Module names to devices; what it puts on ``"meta"`` is meant to have none.
        offloaded_to: The devices in it that mean offloading.
        weights: The names of the offloaded weights, as `promised_weights` returns them.
        tied: Groups of names that share one parameter.
        offload_buffers: Whether buffers of offloaded modules are offloaded.

    Raises:
        ValueError: Tensors have no data; the message names them.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors = all_tensors(model)
    empty = {name for name, tensor in tensors.items() if tensor.device.type == "meta"}
    for group in tied:
        if any(tensors[name].device.type != "meta" for name in group):
            empty.difference_update(group)  # they are tied again
    # A module that has several names has one set of tensors, of which weights may know any name.
    known = {
        id(tensors[name])
        for name in empty
        if _is_known(name, device_map, offloaded_to, weights, buffers, offload_buffers)
    }
    missing = [(name, device_of(name, device_map)) for name in sorted(empty) if id(tensors[name]) not in known]
    if missing:
        raise ValueError(
            f"These tensors are on the meta device and nobody has their data: "
            f"{listed(f'{name} (for {device!r})' for name, device in missing)}. Load them from a checkpoint first, tie the "
            "model's weights, or, for buffers of modules that are offloaded, pass `offload_buffers=True`."
        )


def _is_known(
    name: str,
    device_map: Mapping[str, Device],
    offloaded_to: set[str],
    weights: Container[str],
    buffers: Mapping[str, torch.Tensor],
    offload_buffers: bool,
) -> bool:
    """Whether a hook will bring a tensor's data, or it is meant to have none."""
    device = device_of(name, device_map)
    if device not in offloaded_to:
        return str(device) == "meta"
    return name in weights and (offload_buffers or name not in buffers)


def shared_pointers(model: nn.Module, tied: Sequence[Sequence[str]]) -> dict[int, dict[Any, torch.Tensor]]:
    """Return the addresses of tied weights that hold data, to each of which hooks note its copies per device.

    Args:
        model: The model.
        tied: Groups of names that share one parameter.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False)) if tied else {}
    named = (parameters[name] for group in tied for name in group)
    return {parameter.data_ptr(): {} for parameter in named if parameter.device.type != "meta"}
