"""Weights of bitsandbytes: numbers of 8 or 4 bits that mean nothing without the scales kept beside them.

The classes are known by name, so that nothing here imports bitsandbytes. Its parameters quantise floating-point data when
`to` moves them, and keep the scales as attributes: `SCB` (8 bit) or `quant_state` (4 bit).
"""

import copy
from typing import Any

import torch
from torch import nn

INT8 = "Int8Params"
FOUR_BIT = ("Params4bit", "FP4Params")
_META = torch.device("meta")
# Attribute of a 4-bit weight: scales and shape that the numbers had before they came to their device.
_AT_REST = "accelerate_at_rest"


def scales_name(weight_name: str) -> str:
    """Return the name under which checkpoints hold the scales of an 8-bit weight.

    Args:
        weight_name: Full name of the weight, or any part of it that has the end.

    Example:
        >>> scales_name("weighting.weight")
        'weighting.SCB'
    """
    return f"{weight_name.removesuffix('weight')}SCB"


def quantizes(parameter: torch.Tensor) -> bool:
    """Say whether a tensor is a weight of bitsandbytes that is quantised, or will be once it has data.

    Args:
        parameter: Any parameter or buffer.
    """
    kind = type(parameter).__name__
    return kind in FOUR_BIT or (kind == INT8 and not getattr(parameter, "has_fp16_weights", False))


def is_settled(weight: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Say whether a weight of bitsandbytes would be the same if it were placed again where it is.

    Args:
        weight: The weight; one without data needs no quantising.
        dtype: What it is to be cast to, if it is not quantised yet. None: not at all.
    """
    state = getattr(weight, "quant_state", None)
    if state is not None:
        return not _is_twisted(state)
    return weight.dtype is torch.int8 or (weight.is_meta and dtype in (None, weight.dtype))


def place_quantized(
    owner: nn.Module,
    name: str,
    value: torch.Tensor | None,
    target: torch.device,
    dtype: torch.dtype | None,
    scales: torch.Tensor | None,
    non_blocking: bool,
) -> nn.Parameter:
    """Return the parameter to put in the place of a weight of bitsandbytes; the present one stays as it is.

    On the meta device a weight keeps its scales, which are small (8 bit: one number per row; 4 bit: one per block of 64):
    numbers that come back later fit them, and the state dict is whole.

    Args:
        owner: The module that has the weight.
        name: The weight's name in it.
        value: The new value: floating-point numbers, which are quantised, or quantised ones. None: the present weight.
        target: Where it goes.
        dtype: Floating-point numbers are cast to this before they are quantised. None: to the present weight's dtype.
        scales: Scales of an 8-bit value. None: those that the value, or else the present weight, has.
        non_blocking: Let copies overlap with computation where memory is pinned.

    Raises:
        ValueError: A quantised value without scales, or one of another shape.
        RuntimeError: The installed bitsandbytes cannot quantise on this device.
    """
    old = getattr(owner, name)
    _take_scales_back(owner, old)
    source = old if value is None else value
    if type(old).__name__ == INT8:
        return _int8(name, old, source, target, dtype, scales, non_blocking)
    new = _four_bit(owner, name, old, source, target, dtype, non_blocking)
    if getattr(owner, "weight", None) is old and hasattr(owner, "quant_state"):
        owner.quant_state = new.quant_state  # else the layer holds on to the scales that were
    return new


def _take_scales_back(owner: nn.Module, weight: torch.Tensor) -> None:
    """Undo what the first forward of an 8-bit layer does: it moves the scales from the weight to the layer, which would keep
    them, and with them the numbers, when the weight is replaced."""
    state = getattr(owner, "state", None)
    if type(weight).__name__ != INT8 or getattr(owner, "weight", None) is not weight or not hasattr(state, "SCB"):
        return
    if state.SCB is not None and weight.SCB is None:
        weight.CB, weight.SCB = weight.data, state.SCB
    state.CB = state.SCB = None


def _remade(old: nn.Parameter, data: torch.Tensor, attributes: dict[str, Any]) -> nn.Parameter:
    made = torch.Tensor._make_subclass(type(old), data.detach(), False)
    made.__dict__.update({**old.__dict__, **attributes})
    made.__dict__.pop(_AT_REST, None)
    return made


def _floating(source: torch.Tensor, old: torch.Tensor, dtype: torch.dtype | None, quantized: bool) -> torch.Tensor:
    """The data of a weight that is not quantised yet, in the dtype that it is to have before."""
    if dtype is None and not quantized:
        dtype = old.dtype
    return source.data if dtype is None else source.data.to(dtype)


def _int8(
    name: str,
    old: nn.Parameter,
    source: torch.Tensor,
    target: torch.device,
    dtype: torch.dtype | None,
    scales: torch.Tensor | None,
    non_blocking: bool,
) -> nn.Parameter:
    if source.dtype is not torch.int8:
        data = _floating(source, old, dtype, quantized=old.dtype is torch.int8)
        if target.type == "meta":
            return _remade(old, data.to(_META), {"CB": None, "SCB": scales})
        # bitsandbytes quantises 8-bit weights on their way from the CPU, and only then.
        made = _remade(old, data.to("cpu"), {"CB": None, "SCB": None}).to(target, non_blocking=non_blocking)
        _check_quantized(made, made.dtype is torch.int8, target)
        return made
    if scales is None:
        own = getattr(source, "SCB", None)
        scales = old.SCB if own is None else own
    if target.type == "meta":
        return _remade(old, source.data.to(_META), {"CB": None, "SCB": scales})
    if scales is None:
        raise ValueError(
            f"The value for {name!r} is an 8-bit weight without its scales: pass them as `fp16_statistics` (checkpoints name "
            f"them {scales_name('weight')!r}), or give the weight as it was before it was quantised."
        )
    data = source.data.to(target, non_blocking=non_blocking)
    return _remade(old, data, {"CB": data, "SCB": scales.to(target, non_blocking=non_blocking)})


def _four_bit(
    owner: nn.Module,
    name: str,
    old: nn.Parameter,
    source: torch.Tensor,
    target: torch.device,
    dtype: torch.dtype | None,
    non_blocking: bool,
) -> nn.Parameter:
    state = getattr(source, "quant_state", None)
    if state is None and not source.is_floating_point() or _is_packed_like(source, old):
        state = old.quant_state
        if state is None:
            raise ValueError(
                f"The value for {name!r} is a packed 4-bit weight without its scales: give a Params4bit that has a "
                "`quant_state`, or the weight as it was before it was quantised."
            )
    if state is not None:
        return _packed(old, source, state, target, non_blocking)
    expected = (getattr(owner, "out_features", None), getattr(owner, "in_features", None))
    if None not in expected and tuple(source.shape) != expected:
        raise ValueError(
            f"The value for {name!r} has shape {tuple(source.shape)}, but the layer's weight has {expected}. Check that the "
            "checkpoint belongs to this model."
        )
    data = _floating(source, old, dtype, quantized=old.quant_state is not None)
    made = _remade(
        old, data.to(_META) if target.type == "meta" else data, {"quant_state": None, "bnb_quantized": False}
    )
    if target.type == "meta":
        return made
    made = made.to(target, non_blocking=non_blocking)
    _check_quantized(made, made.quant_state is not None, target)
    return made


def _packed(
    old: nn.Parameter, source: torch.Tensor, state: Any, target: torch.device, non_blocking: bool
) -> nn.Parameter:
    """A weight that is quantised. On some CPUs the first forward packs numbers and scales in another way, so what is put on a
    device gets scales of its own, and goes back to the meta device with those of the numbers that it was filled from."""
    if target.type == "meta":
        at_rest, shape = source.__dict__.get(_AT_REST) or (_copied(state), source.shape)
        made = _remade(old, torch.empty(shape, dtype=source.dtype, device="meta"), {"quant_state": at_rest})
    else:
        own = _copied(state)
        own.to(target)
        made = _remade(old, source.data.to(target, non_blocking=non_blocking), {"quant_state": own})
        if source is not old:
            setattr(made, _AT_REST, (state, source.shape))
    made.bnb_quantized = True
    return made


def _is_packed_like(source: torch.Tensor, old: nn.Parameter) -> bool:
    """Whether plain numbers are packed as the present weight's are; their dtype may be a floating-point one (quant_storage)."""
    same = source.shape == old.shape and source.dtype is old.dtype
    return same and type(source).__name__ not in FOUR_BIT and old.quant_state is not None


def _copied(state: Any) -> Any:
    """Scales that may be moved and packed, both of which bitsandbytes does in place."""
    copied = copy.copy(state)
    if getattr(copied, "state2", None) is not None:
        copied.state2 = copy.copy(copied.state2)
    if _is_twisted(copied):
        copied.absmax = copied.absmax.T.reshape(-1).float()
    return copied


def _is_twisted(state: Any) -> bool:
    """Whether `state_dict()` of bitsandbytes unpacked a weight that a forward on some CPUs had packed, and left its scales
    transposed: 0.50.2 and before do. Such a weight is wrong until the scales are turned back."""
    return state.absmax.dim() == 2 and not getattr(state, "packing_format_for_cpu", False)


def _check_quantized(parameter: nn.Parameter, is_quantized: bool, target: torch.device) -> None:
    if is_quantized:
        return
    import bitsandbytes

    raise RuntimeError(
        f"bitsandbytes {bitsandbytes.__version__} did not quantise a {type(parameter).__name__} on {target}. Install a newer "
        "one (`pip install -U bitsandbytes`), or use a device that this one supports."
    )
