"""Where the weights of a model are: gathering the offloaded ones, checking that none is missing, the state dict."""

import logging
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.offload.placement import FOUR_BIT, Device, offloading_hook
from accelerate.offload.store import (
    INDEX_NAME,
    OffloadedWeightsLoader,
    OffloadWriter,
    PathLike,
    extract_submodules_state_dict,
    read_index,
)
from accelerate.offload.tensors import device_of, listed, named_module_tensors

logger = logging.getLogger("accelerate.big_modeling")


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer of a model by every name it has."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's state dict without the extra state that modules keep in other forms, which stays with them."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def gather_weights(
    model: nn.Module,
    on_cpu: Sequence[str],
    on_disk: Sequence[str],
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: PathLike | None,
    offload_index: Mapping[str, dict] | None,
    offload_buffers: bool,
) -> OffloadedWeightsLoader | None:
    """Return where hooks read offloaded weights from, or None; what goes to disk and has no index is written.

    `state_dict` has the weights of `on_cpu` (None: the model's). FileNotFoundError: the index names a file that is not
    there. OSError: the disk is full; nothing is left behind. ValueError: no place on disk, or what is there does not
    fit the model.
    """
    if state_dict is None and on_cpu:
        state_dict = extract_submodules_state_dict(state_tensors(model), on_cpu)
    given = offload_index is not None
    if on_disk and not given:
        if offload_dir is None:
            raise ValueError(
                f"The device_map sends {listed(map(repr, on_disk))} to the disk: give an `offload_dir` to put them in, or the "
                "`offload_index` of where they are."
            )
        offload_index = write_missing(model, on_disk, offload_buffers, offload_dir)
    if state_dict is None and not on_disk:
        return None
    in_memory = {name: tensor.to("cpu") for name, tensor in (state_dict or {}).items() if tensor.device.type != "meta"}
    weights = OffloadedWeightsLoader(in_memory, offload_dir if on_disk else None, offload_index)
    if on_disk and given:
        check_stored(weights, extract_submodules_state_dict(all_tensors(model), on_disk))
    return weights


def write_missing(
    model: nn.Module, modules: Sequence[str], offload_buffers: bool, folder: PathLike
) -> dict[str, dict[str, Any]]:
    """Write what a folder's index lacks of some modules, and return the whole index; what differs is warned about.

    Tensors on the meta device are left out. Errors are those of `check_stored`, `read_index` and `OffloadWriter`.
    """
    buffers = set() if offload_buffers else {name for name, _ in model.named_buffers(remove_duplicate=False)}
    wanted = extract_submodules_state_dict(state_tensors(model), modules)
    state_dict = {name: tensor for name, tensor in wanted.items() if name not in buffers}
    index = read_index(folder)
    stored = OffloadedWeightsLoader(save_folder=folder, index=index)
    check_stored(stored, state_dict)
    data = {name: tensor for name, tensor in state_dict.items() if tensor.device.type != "meta"}
    with OffloadWriter(folder) as writer:
        for name, tensor in data.items():
            if name not in index:
                writer.add(name, tensor)
    other = [
        name for name, tensor in data.items() if name in index and not torch.equal(stored[name], tensor.to("cpu"))
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
    """Raise a ValueError where stored weights differ in shape, FileNotFoundError without file; none is read."""
    problems = []
    for name, tensor in tensors.items():
        if name not in weights.index or name in weights.state_dict:
            continue
        shape = weights.stored(name).shape
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
    """Make a tied weight, which checkpoints hold under one name only, known under its other names."""
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
    offload_dir: PathLike | None = None,
    offload_index: Mapping[str, dict] | None = None,
) -> set[str]:
    """Return the names of the weights that will be found once those in memory are offloaded. Nothing is written."""
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
    """Raise a ValueError that names the tensors that would have no data once a model is dispatched.

    `weights` has the names that `promised_weights` returns, `offloaded_to` the devices that mean offloading; what the
    map puts on ``"meta"`` is meant to have none.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors = all_tensors(model)
    empty = {name for name, tensor in tensors.items() if tensor.device.type == "meta"}
    for group in tied:
        if any(tensors[name].device.type != "meta" for name in group):
            empty.difference_update(group)  # they are tied again

    def arrives(name: str) -> bool:
        """Whether a hook will bring a tensor's data, or it is meant to have none."""
        device = device_of(name, device_map)
        if device not in offloaded_to:
            return str(device) == "meta"
        return name in weights and (offload_buffers or name not in buffers)

    # A module that has several names has one set of tensors, of which weights may know any name.
    known = {id(tensors[name]) for name in empty if arrives(name)}
    missing = [f"{n} (for {device_of(n, device_map)!r})" for n in sorted(empty) if id(tensors[n]) not in known]
    if missing:
        raise ValueError(
            f"These tensors are on the meta device and nobody has their data: {listed(missing)}. Load them from a checkpoint "
            "first, tie the model's weights, or, for buffers of modules that are offloaded, pass `offload_buffers=True`."
        )


def shared_pointers(model: nn.Module, tied: Sequence[Sequence[str]]) -> dict[int, dict[Any, torch.Tensor]]:
    """Return the addresses of tied weights that hold data, to each of which hooks note its copies per device."""
    parameters = dict(model.named_parameters(remove_duplicate=False)) if tied else {}
    named = (parameters[name] for group in tied for name in group)
    return {parameter.data_ptr(): {} for parameter in named if parameter.device.type != "meta"}


def _offloaded(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield the tensors that hooks keep elsewhere: each one's name, the hook, and its name below the hook's module."""
    for path, module in model.named_modules(remove_duplicate=False):
        hook = offloading_hook(module)
        if hook is None or hook.weights_map is None:
            continue
        for name, tensor in named_module_tensors(module, recurse=hook.place_submodules):
            if tensor.device.type == "meta" and name in hook.weights_map:
                yield f"{path}.{name}".removeprefix("."), hook, name


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, Any]:
    """Fill the entries of a state dict that belong to one module with the module's real weights.

    Args:
        module: The module, offloaded or not.
        module_name: Full name of one of its tensors in the model, such as ``"layers.0.weight"``.
        state_dict: Receives the tensors, for the names that it already has.
        device_to_put_offload: Where tensors that are offloaded are read to.

    Returns:
        The same dict.
    """
    prefix = module_name[: module_name.rfind(".") + 1]
    own = {name: tensor for name, tensor in module.state_dict().items() if prefix + name in state_dict}
    for name, hook, key in _offloaded(module):
        if name in own:
            own[name] = hook.weights_map[key].detach().to(device_to_put_offload)
    state_dict.update({prefix + name: tensor for name, tensor in own.items()})
    return state_dict


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the whole state dict of a model, offloaded weights included, without moving the model.

    Weights on disk come as tensors mapped to their files, so they take host memory only while they are read. Any rank
    may call it alone.

    Args:
        model: A model that `dispatch_model`, `cpu_offload` or `disk_offload` prepared, or any other.

    Returns:
        Name to tensor, offloaded ones on the CPU, the others where they are.
    """
    state_dict = model.state_dict()
    empty = {name for name, tensor in all_tensors(model).items() if tensor.device.type == "meta"}
    for name, hook, key in _offloaded(model):
        empty.discard(name)
        if name in state_dict:
            state_dict[name] = hook.weights_map[key].detach()
    if empty:
        logger.warning(
            "No hook of the model knows the data of these tensors on the meta device: %s", ", ".join(sorted(empty))
        )
    return state_dict
