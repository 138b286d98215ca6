"""Optimizer states of few bits, from torchao: plain tensors in a checkpoint, which any ranks can read, rebuilt for a rank's part.

torchao rounds a state block by block. *Codes* have its shape. There is one *scale* for each block of 256 values, in the
order of the full flat tensor if parts are complete blocks. So codes and scales are saved, and other ranks read them as they
are. If parts of ranks are uneven, or codes have another shape (4 bits), values are saved, and rounded again when read.

Source:
    https://arxiv.org/abs/2110.02861, https://github.com/pytorch/ao/tree/main/torchao/optim
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from accelerate.modules.tensor_kinds import TensorKind
from accelerate.runtime.torch_private import box


class LowBitStates(TensorKind):
    """States of torchao's optimizers."""

    def is_kept_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer is one of torchao's."""
        return makes(optimizer)

    def plain(self, value: Any) -> Any:
        """Return the parts of a value of few bits, or values."""
        return plain(value)

    def is_parts(self, value: Any) -> bool:
        """Return whether a stored value has codes and scales."""
        return is_parts(value)

    def rebuilt(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state with values of few bits where the optimizer keeps them."""
        return rebuilt(optimizer, state)


def plain(value: Any) -> Any:
    """Return the checkpoint's form of a value of an optimizer's state: the value, or for few bits a dict of its parts or values.

    Nothing is copied, and DTensors stay DTensors. The form depends on the shape, so all ranks of a mesh find the same.

    Not a collective.
    """
    local = _local(value)
    if not is_low_bit(local):
        return value
    names, _ = local.__tensor_flatten__()
    if local.codes.shape != local.shape or not _is_even(value):
        return _spread_as(value, local.dequantize().to(value.dtype), value.shape)
    parts = {name: getattr(local, name) for name in names}
    parts["codes"] = _spread_as(value, local.codes, value.shape)
    parts["scale"] = _spread_as(value, local.scale, torch.Size([value.numel() // local.block_size]))
    return parts


def makes(optimizer: Any) -> bool:
    """Return whether an optimizer keeps states of few bits: it is one of torchao's."""
    return isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_new_buffer")


def is_low_bit(value: Any) -> bool:
    """Return whether a tensor is a state of few bits: made of codes, and scales for blocks of them."""
    return hasattr(value, "__tensor_flatten__") and {"codes", "scale"}.issubset(value.__tensor_flatten__()[0])


def is_parts(value: Any) -> bool:
    """Return whether a stored value is what `plain` makes of one of few bits."""
    return isinstance(value, Mapping) and {"codes", "scale"}.issubset(value)


@torch.no_grad()
def rebuilt(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state, as `load_state_dict` takes it, with values of few bits exactly where an optimizer keeps such.

    Scales are unsharded, other tensors have the optimizer's own shards. An optimizer of few bits rounds the state of another.

    Not a collective.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return state  # an optimizer with its own form
    states = dict(state["state"])
    kinds = {type(value) for values in states.values() if isinstance(values, Mapping) for value in values.values()}
    if dict not in kinds and not makes(optimizer):  # nothing in parts
        return state
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        values = states.get(number)
        if isinstance(values, Mapping):
            states[number] = {key: _rebuilt(optimizer, parameter, key, value) for key, value in values.items()}
    return {**state, "state": states}


_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def _rebuilt(optimizer: Any, parameter: torch.Tensor, key: str, value: Any) -> Any:
    in_parts = is_parts(value)
    if not in_parts and key not in _MOMENTS:
        return value  # of others, such as an average of the weights
    if not in_parts and (not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not value.dim()):
        return value
    buffer = optimizer._new_buffer(parameter, key == "exp_avg") if makes(optimizer) else None
    if not is_low_bit(_local(buffer)):
        if not in_parts:
            return value
        buffer = torch.empty_like(parameter)
    if in_parts:
        _read_parts(_local(buffer), value, parameter)
    else:
        _local(buffer).copy_(_local(value))
    return buffer


def _read_parts(target: Any, parts: Mapping[str, Any], parameter: torch.Tensor) -> None:
    """Fill this rank's part of a state from stored parts: as they are, where blocks are the same ones, else by values."""
    codes, scale, shape = _local(parts["codes"]), parts["scale"], list(parameter.shape)
    starts = [part.start for part in box(parameter)] or [0] * len(shape)
    block = math.prod(shape) // len(scale)
    first = starts[0] * math.prod(shape[1:])
    is_run = list(codes.shape[1:]) == shape[1:] and first % block == 0  # complete blocks, in the flat tensor
    if is_run and is_low_bit(target) and target.codes.shape == codes.shape and target.block_size == block:
        target.codes.copy_(codes)
        target.scale.copy_(scale[first // block :][: len(target.scale)])
        return
    places = torch.zeros((), dtype=torch.int64)
    for dim, (start, count) in enumerate(zip(starts, codes.shape, strict=True)):
        along = (torch.arange(count) + start) * math.prod(shape[dim + 1 :])
        places = places + along.view(-1, *[1] * (len(shape) - dim - 1))
    values = parts["qmap"][codes.long()] if "qmap" in parts else codes.float()
    target.copy_(values * scale[places // block])


def _local(value: Any) -> Any:
    with torch.no_grad():  # with gradients torch would make a view
        return value.to_local() if hasattr(value, "to_local") else value


def _is_even(value: Any) -> bool:
    """Return whether a tensor is unsharded, or its ranks have equal numbers of its rows, in their order."""
    placements = getattr(value, "placements", ())
    shards = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if len(shards) > 1 or any(type(placements[dim]).__name__ != "Shard" or placements[dim].dim for dim in shards):
        return False
    return all(value.shape[0] % value.device_mesh.size(dim) == 0 for dim in shards)


def _spread_as(value: Any, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return this rank's part of a tensor of some shape, with the placements of another."""
    if not hasattr(value, "to_local"):
        return part
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    spread: torch.Tensor = type(value).from_local(
        part, value.device_mesh, value.placements, run_check=False, shape=shape, stride=strides
    )
    return spread
