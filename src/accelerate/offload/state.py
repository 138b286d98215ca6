"""The state dict of a model part of whose weights are offloaded."""

import logging
from typing import Any

import torch
from torch import nn

from accelerate.offload.placement import _offloading_hook
from accelerate.offload.tensors import named_module_tensors

logger = logging.getLogger("accelerate.utils.modeling")


def _offloaded_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a module's hook keeps elsewhere, by their name below the module."""
    hook = _offloading_hook(module)
    if hook is None or hook.weights_map is None:
        return {}
    tensors = named_module_tensors(module, recurse=hook.place_submodules, remove_non_persistent=True)
    return {
        name: hook.weights_map[name].detach()
        for name, tensor in tensors
        if tensor.device.type == "meta" and name in hook.weights_map
    }


def tensors_without_data(model: nn.Module) -> list[str]:
    """Return the names of tensors that are on the meta device although no hook keeps their data.

    Args:
        model: The model, dispatched or not.
    """
    empty = {name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.device.type == "meta"}
    empty |= {name for name, tensor in model.named_buffers(remove_duplicate=False) if tensor.device.type == "meta"}
    for path, module in model.named_modules(remove_duplicate=False) if empty else ():
        hook = _offloading_hook(module)
        if hook is not None and hook.weights_map is not None:
            prefix = f"{path}." if path else ""
            below = named_module_tensors(module, recurse=hook.place_submodules)
            empty -= {prefix + name for name, _ in below if name in hook.weights_map}
    return sorted(empty)


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
    prefix = module_name.rpartition(".")[0]
    prefix = f"{prefix}." if prefix else ""
    own = dict(module.state_dict())
    own.update({name: tensor.to(device_to_put_offload) for name, tensor in _offloaded_tensors(module).items()})
    for name, tensor in own.items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = tensor
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
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, tensor in _offloaded_tensors(module).items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = tensor
    empty = tensors_without_data(model)
    if empty:
        logger.warning("No hook of the model knows the data of these tensors on the meta device: %s", ", ".join(empty))
    return state_dict
