"""Where the weights of a model are: gathering the offloaded ones, checking that none is missing, the state dict."""

import logging
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.extensions.big_models.placement import FOUR_BIT, Device
from accelerate.extensions.big_models.store import (
    INDEX_NAME,
    OffloadedWeightsLoader,
    OffloadWriter,
    PathLike,
    extract_submodules_state_dict,
    read_index,
)
from accelerate.extensions.big_models.tensors import device_of, find_tied_parameters, listed, named_module_tensors
from accelerate.modules.offloaded import offloading_hook

logger = logging.getLogger("accelerate.big_modeling")


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer of a model by every name it has."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's state dict without the extra state that modules keep in other forms, which stays with them."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


@dataclass
class Offloading:
    """What a dispatched model keeps elsewhere: checked before anything is changed, then gathered.

    Attributes:
        places: The device of each module, of which none is in another.
        elsewhere: The devices that mean offloading.
        state_dict: The weights of what is offloaded to the CPU. None: the model's.
        offload_dir: The folder of what goes to disk. What its index has is used, the rest is written.
        offload_index: Where weights on disk are; then nothing is written.
    """

    model: nn.Module
    places: Mapping[str, Device]
    elsewhere: set[str]
    offload_buffers: bool
    state_dict: Mapping[str, torch.Tensor] | None = None
    offload_dir: PathLike | None = None
    offload_index: Mapping[str, dict] | None = None

    def __post_init__(self) -> None:
        self.tied = find_tied_parameters(self.model)

    def check(self) -> None:
        """Raise a ValueError that names the tensors without data. Nothing is written."""
        index = self.offload_index
        if index is None:
            index = {} if self.offload_dir is None else read_index(self.offload_dir)
        in_memory = [*state_tensors(self.model).items(), *(self.state_dict or {}).items()]
        found = {*index, *(name for name, tensor in in_memory if tensor.device.type != "meta")}
        for group in self.tied:
            if not found.isdisjoint(group):
                found.update(group)
        check_data(self.model, self.places, self.elsewhere, found, self.tied, self.offload_buffers)

    def gather(self) -> OffloadedWeightsLoader | None:
        """Return where hooks read offloaded weights from, or None; what goes to disk and has no index is written.

        FileNotFoundError: the index names a file that is not there. OSError: the disk is full; nothing is left behind.
        ValueError: no place on disk, or what is there does not fit the model.
        """
        on_cpu, on_disk = (
            [name for name, device in self.places.items() if device == kind] for kind in ("cpu", "disk")
        )
        state_dict, index = self.state_dict, self.offload_index
        if state_dict is None and on_cpu and "cpu" in self.elsewhere:
            state_dict = extract_submodules_state_dict(state_tensors(self.model), on_cpu)
        if on_disk and index is None:
            if self.offload_dir is None:
                raise ValueError(
                    f"The device_map sends {listed(map(repr, on_disk))} to the disk: give an `offload_dir` to put them in, or "
                    "the `offload_index` of where they are."
                )
            index = write_missing(self.model, on_disk, self.offload_buffers, self.offload_dir)
        if state_dict is None and not on_disk:
            return None
        in_memory = {name: tensor.to("cpu") for name, tensor in (state_dict or {}).items() if not tensor.is_meta}
        weights = OffloadedWeightsLoader(in_memory, self.offload_dir if on_disk else None, index)
        if on_disk and self.offload_index is not None:
            check_stored(weights, extract_submodules_state_dict(all_tensors(self.model), on_disk))
        name_tied_weights(weights, self.tied)
        return weights


def write_missing(
    model: nn.Module, modules: Sequence[str], offload_buffers: bool, folder: PathLike
) -> dict[str, dict[str, Any]]:
    """Write what a folder's index lacks of some modules, and return the whole index; what differs is warned about.

    Tensors on the meta device are omitted. Errors are those of `check_stored`, `read_index` and `OffloadWriter`.
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


def name_tied_weights(weights: OffloadedWeightsLoader, tied: Sequence[Sequence[str]]) -> None:
    """Make a tied weight, which checkpoints hold under one name only, known under its other names."""
    for group in tied:
        known = next((name for name in group if name in weights), None)
        for name in group if known is not None else ():
            if name in weights:
                continue
            if known in weights.state_dict:
                weights.state_dict[name] = weights.state_dict[known]
            else:
                entry = weights.index[known]
                # An entry without a key is found under its own name.
                own = {"weight_name": known} if entry.get("safetensors_file") is not None else {"dat_name": known}
                weights.index[name] = {**own, **entry}
            weights.all_keys.append(name)


def check_data(
    model: nn.Module,
    device_map: Mapping[str, Device],
    offloaded_to: set[str],
    weights: Container[str],
    tied: Sequence[Sequence[str]],
    offload_buffers: bool,
) -> None:
    """Raise a ValueError that names the tensors that would have no data once a model is dispatched.

    `weights` has the names of those that will be found then, `offloaded_to` the devices that mean offloading; what the
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
            f"These tensors are on the meta device and their data is missing: {listed(missing)}. Load them from a checkpoint "
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
    """Return the full state dict of a model, offloaded weights included, without moving the model.

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
