"""4-bit layers of bitsandbytes in training: the packed numbers are a frozen parameter, their scales an attribute of it.

Layers are known by that attribute, `quant_state`, so that nothing here imports bitsandbytes.
"""

import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from accelerate.modules.tensor_kinds import TensorKind


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        # bitsandbytes keeps the scales in both places, and in one once a weight was copied or sharded.
        if "quant_state" in module.__dict__ and hasattr(_state(module), "absmax"):
            yield f"{name}.weight", module


def _state(module: nn.Module) -> Any:
    of_weight = getattr(getattr(module, "weight", None), "quant_state", None)
    return module.quant_state if of_weight is None else of_weight


def keep_unpacked(model: nn.Module) -> None:
    """Keep 4-bit layers unpacked through evaluations, and let them load their scales; ValueError: packed before.

    In a forward in `eval()` on CPUs with AVX512-BF16 bitsandbytes packs them. Then scales are rounded, and later no gradient
    passes through the layer, or the packed numbers are lost with the buffer that a shard was gathered into.
    """
    for name, module in _layers(model):
        module.quant_state = _state(module)
        if module.quant_state.absmax.dim() == 2:
            raise ValueError(
                f"{name!r} was evaluated on the CPU before it was prepared, for which bitsandbytes has packed it and rounded its "
                "scales. Load the model again, and call prepare() before the first evaluation."
            )
        module.support_avx512bf16_for_cpu = False  # bitsandbytes' own switch
        module.register_load_state_dict_pre_hook(_load_scales)


def require_shardable(model: nn.Module, ignored: Collection[nn.Parameter], cast_to: torch.dtype | None) -> None:
    """Refuse quantised weights that FSDP2 would change or whose scales it would lose, by a ValueError.

    Not a collective.
    """
    for name, parameter in model.named_parameters():
        if parameter in ignored:
            continue
        if type(parameter).__name__ == "Int8Params":
            raise ValueError(
                f"{name!r} is an 8-bit weight of bitsandbytes, whose scales FSDP2 would lose. Load the model with "
                "load_in_4bit=True, or train it without FSDP."
            )
        packed = getattr(parameter, "quant_state", None) is not None and parameter.is_floating_point()
        if packed and cast_to not in (None, parameter.dtype):
            raise ValueError(
                f"{name!r} has 4-bit numbers stored as {parameter.dtype}, which mixed precision would cast to {cast_to}. Load the "
                f"model with bnb_4bit_quant_storage={cast_to} (or torch.uint8)."
            )


class PackedWeights(TensorKind):
    """Scales of 4-bit layers, which are neither parameters nor buffers."""

    def of_model(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the scales by their names."""
        if "bitsandbytes" not in sys.modules:
            return {}
        scales: dict[str, torch.Tensor | None] = {}
        for name, module in _layers(model):
            state = _state(module)
            scales[f"{name}.absmax"], scales[f"{name}.nested_offset"] = state.absmax, state.offset
            scales[f"{name}.nested_absmax"] = getattr(state.state2, "absmax", None)
        return {name: tensor for name, tensor in scales.items() if tensor is not None}


def attach(model: nn.Module) -> None:
    """Give scales to the shards that took the place of 4-bit weights, so that state dicts have them."""
    for _, module in _layers(model):
        _attach(module, _state(module))


def _attach(module: nn.Module, state: Any) -> None:
    module.quant_state = module.weight.quant_state = state
    if not hasattr(type(module.weight), "absmax"):
        # Torch looks up each name of a state dict; bitsandbytes' own parameters find theirs.
        for name in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"):
            module.weight.__dict__[name] = state.as_dict().get(name)


def _load_scales(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take a 4-bit layer's scales from a state dict, for which bitsandbytes' layers have no names."""
    names = [name for name in state if name.startswith(f"{prefix}weight.")]
    if names:
        state_of_layer = {name.removeprefix(f"{prefix}weight."): state.pop(name) for name in names}
        _attach(module, type(module.quant_state).from_dict(state_of_layer, module.quant_state.absmax.device))
