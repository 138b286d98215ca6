"""Functions for sharded models and their optimizers that programs import from `accelerate.utils.fsdp_utils`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accelerate.modules.unwrap import canonical_name
from accelerate.strategies import shard


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by the names they had before `torch.compile` and activation checkpointing wrapped modules.

    Example:
        >>> fsdp2_canonicalize_names({"_orig_mod.layer._checkpoint_wrapped_module.weight": 1})
        {'layer.weight': 1}
    """
    return {canonical_name(name): value for name, value in named_params.items()}


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, Any]) -> None:
    """Let an optimizer that was made before sharding update the sharded parameters, in place.

    Args:
        optimizer: it must not have stepped, because its state has the old shapes.
        mapping: from each old parameter, or its `data_ptr`, to the new one.

    Raises:
        KeyError: a parameter of the optimizer is not in `mapping`; nothing was changed.
    """
    switched = []
    for index, group in enumerate(optimizer.param_groups):
        new = []
        for position, parameter in enumerate(group["params"]):
            # An earlier step may have written the address on the parameter, because its storage is gone by now.
            address = parameter.data_ptr
            address = address() if callable(address) else address
            key = parameter if parameter in mapping else address
            if key not in mapping:
                raise KeyError(
                    f"Parameter {position} of the optimizer's group {index} (shape {tuple(parameter.shape)}) has no sharded "
                    "counterpart. Make the optimizer from the parameters of the model that is prepared with it."
                )
            new.append(mapping[key])
        switched.append(new)
    for group, new in zip(optimizer.param_groups, switched, strict=True):
        group["params"] = new


def get_fsdp2_grad_scaler(**kwargs: Any) -> "torch.amp.GradScaler":
    """Return a gradient scaler for fp16 with `fully_shard`; its sharded gradients need no special one."""
    return torch.amp.GradScaler(**kwargs)


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Distribute rank 0's full state dict over a sharded model; other ranks hold no more than their shards.

    Collective: call on every rank.

    Args:
        accelerator: the Accelerator.
        model: sharded by `fully_shard`; shards without memory get some.
        full_sd: on rank 0, full tensors by name; not used elsewhere. Buffers outside all state dicts do not change.
        cpu_offload: shards stay in host memory.

    Raises:
        RuntimeError: rank 0's state does not fit the model.
    """
    state_names = {canonical_name(name) for name in model.state_dict()}
    kept = {
        name: buffer
        for name, buffer in model.named_buffers()
        if canonical_name(name) not in state_names and not buffer.is_meta
    }
    if any(parameter.is_meta for parameter in model.parameters()):
        shard.allocate(model, accelerator.device, cpu_offload)
        for name, buffer in kept.items():
            module, _, entry = name.rpartition(".")
            model.get_submodule(module)._buffers[entry] = buffer.to(accelerator.device)
    shard.distribute(accelerator, model, full_sd, optional=[canonical_name(name) for name in kept])
