"""Quantising models to 8 or 4 bit with bitsandbytes while they are loaded."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.big_modeling import dispatch_model, init_empty_weights, load_checkpoint_in_model
from accelerate.config.bnb import BnbQuantizationConfig
from accelerate.config.enums import CustomDtype
from accelerate.offload.device_map import infer_auto_device_map
from accelerate.offload.memory import get_balanced_memory
from accelerate.offload.placement import Device, default_device
from accelerate.offload.quantized import quantize_and_offload_8bit
from accelerate.offload.tied import find_tied_parameters
from accelerate.utils.imports import is_4bit_bnb_available, is_8bit_bnb_available

__all__ = [
    "get_keys_to_not_convert",
    "get_parameter_device",
    "get_quantized_model_device_map",
    "has_4bit_bnb_layers",
    "load_and_quantize_model",
    "quantize_and_offload_8bit",
    "replace_with_bnb_layers",
]

logger = logging.getLogger(__name__)

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike | None = None,
    device_map: str | dict[str, Device] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Replace a model's linear layers by quantised ones, load its weights and put it on its devices.

    Args:
        model: The model; best made under `init_empty_weights`. If it has weights, they are quantised and the arguments
            below are not used.
        bnb_quantization_config: What to quantise, and how.
        weights_location: Checkpoint to load, as for `load_checkpoint_in_model`.
        device_map: Module name to device, or one of ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``. None:
            everything on this process's accelerator.
        no_split_module_classes: For a computed map, names of classes whose instances stay on one device.
        max_memory: For a computed map, the most that each device may take.
        offload_folder: Where weights go whose device is ``"disk"``.
        offload_state_dict: Keep weights for the CPU in a temporary folder while files are read.

    Returns:
        The quantised model.

    Raises:
        ImportError: bitsandbytes is missing or too old.
        RuntimeError: There is no accelerator, or the model is empty and there is no ``weights_location``.
    """
    config = bnb_quantization_config
    in_8bit = config.load_in_8bit
    if not (is_8bit_bnb_available() if in_8bit else is_4bit_bnb_available()):
        raise ImportError(
            f"{'8' if in_8bit else '4'}-bit quantisation needs bitsandbytes; install it with `pip install -U bitsandbytes`."
        )
    if config.skip_modules is None:
        # Output layers decide between tokens by small differences.
        config.skip_modules = get_keys_to_not_convert(model)
    off_accelerator: list[str] = []
    if isinstance(device_map, dict) and len(device_map) > 1:
        off_accelerator = [name for name, device in device_map.items() if device in ("disk", "cpu")]
    if config.load_in_4bit:
        # 4-bit weights exist on the accelerator only; modules elsewhere stay what they are.
        config.skip_modules = [*config.skip_modules, *off_accelerator]
    if config.keep_in_fp32_modules is None:
        config.keep_in_fp32_modules = []
    unconverted = [*config.skip_modules, *config.keep_in_fp32_modules]
    model.is_loaded_in_4bit = config.load_in_4bit
    model.is_loaded_in_8bit = in_8bit
    if get_parameter_device(model).type != "meta":
        return _quantize_in_place(model, config, unconverted)
    if weights_location is None:
        raise RuntimeError("The model is on the meta device: give the `weights_location` of a checkpoint to load.")

    with init_empty_weights():
        model = replace_with_bnb_layers(model, config, modules_to_not_convert=unconverted)
    placed = get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
    offload = any(device in ("cpu", "disk") for device in placed.values())
    load_checkpoint_in_model(
        model,
        weights_location,
        device_map=placed,
        dtype=config.torch_dtype,
        offload_folder=offload_folder,
        offload_state_dict=offload_state_dict or "disk" in placed.values(),
        keep_in_fp32_modules=config.keep_in_fp32_modules,
        offload_8bit_bnb=in_8bit and offload,
    )
    return dispatch_model(model, device_map=placed, offload_dir=offload_folder)


def _accelerator() -> torch.device:
    device = default_device()
    if device.type == "cpu":
        raise RuntimeError("bitsandbytes quantises on an accelerator, and torch finds none on this machine.")
    return device


def _quantize_in_place(model: nn.Module, config: BnbQuantizationConfig, unconverted: list[str]) -> nn.Module:
    device = _accelerator()
    logger.warning(
        "The model has its weights already, so it is quantised as it is and placed on %s. Make it under "
        "`init_empty_weights` to save memory.",
        device,
    )
    model = replace_with_bnb_layers(model, config, modules_to_not_convert=unconverted)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            kept = any(part in name for part in config.keep_in_fp32_modules)
            parameter.data = parameter.data.to(torch.float32 if kept else config.torch_dtype)
    # Moving is what quantises the weights.
    return model.to(device)


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: str | dict[str, Device] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
) -> dict[str, Device]:
    """Return the device map of a model that will be quantised, computed for the size that it will have then.

    Args:
        model: The model, on the meta device.
        bnb_quantization_config: What is quantised, and how.
        device_map: A map to check, the name of a way to compute one, or None: everything on this process's accelerator.
        max_memory: For a computed map, the most that each device may take.
        no_split_module_classes: For a computed map, names of classes whose instances stay on one device.

    Raises:
        RuntimeError: No map is given and there is no accelerator.
        ValueError: The name is unknown, or 4-bit layers would be on the CPU or the disk.
    """
    config = bnb_quantization_config
    if device_map is None:
        device = _accelerator()
        logger.info("No device_map was given: the model goes to %s.", device)
        return {"": device.index if device.index is not None else 0}
    skipped, kept = config.skip_modules or [], config.keep_in_fp32_modules or []
    if isinstance(device_map, str):
        device_map = _computed_map(model, config, device_map, max_memory, no_split_module_classes)
    elsewhere = {
        name: device
        for name, device in device_map.items()
        if device in ("cpu", "disk") and name not in [*skipped, *kept]
    }
    if elsewhere and config.load_in_4bit:
        raise ValueError(
            f"device_map puts {elsewhere} off the accelerator, where 4-bit layers cannot be. Give more `max_memory` to "
            "accelerators, or a device_map of your own, whose modules on 'cpu' and 'disk' stay unquantised."
        )
    if elsewhere:
        logger.info(
            "Modules on the CPU or the disk are stored as 8 bit and run on the accelerator: %s", list(elsewhere)
        )
    return device_map


def _computed_map(
    model: nn.Module,
    config: BnbQuantizationConfig,
    strategy: str,
    max_memory: Mapping[int | str, int | str] | None,
    no_split: Sequence[str] | None,
) -> dict[str, Device]:
    if strategy not in _AUTOMATIC:
        raise ValueError(
            f"device_map={strategy!r} is unknown. Give a dict, or one of {', '.join(map(repr, _AUTOMATIC))}."
        )
    special: dict[str, torch.dtype] = {}
    for name, _ in model.named_parameters():
        if any(part in name for part in config.skip_modules or []):
            special[name] = config.torch_dtype
        if any(part in name for part in config.keep_in_fp32_modules or []):
            special[name] = torch.float32
    options: dict[str, Any] = {
        "special_dtypes": special,
        "no_split_module_classes": no_split,
        "dtype": CustomDtype.INT4 if config.load_in_4bit else torch.int8,
    }
    if strategy != "sequential":
        low_zero = strategy == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory=max_memory, low_zero=low_zero, **options)
    return infer_auto_device_map(model, max_memory=max_memory, **options)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> nn.Module:
    """Replace the linear layers of a model by layers of bitsandbytes that hold the same weights, not yet quantised.

    Args:
        model: The model, changed in place.
        bnb_quantization_config: Which kind of layer, and its options.
        modules_to_not_convert: Names of modules, whole or as a part of the full name, that stay.
        current_key_name: Parts of the name of ``model`` in a larger one.

    Returns:
        The same model.
    """
    prefix = list(current_key_name or ())
    replaced = _replace_below(model, bnb_quantization_config, list(modules_to_not_convert or ()), prefix)
    if not replaced:
        logger.warning("%s has no linear layer to quantise; it stays as it is.", type(model).__name__)
    return model


def _replace_below(module: nn.Module, config: BnbQuantizationConfig, unconverted: list[str], path: list[str]) -> bool:
    replaced = False
    for name, child in list(module.named_children()):
        full = ".".join([*path, name])
        stays = any(full == part or f".{part}." in f".{full}." for part in unconverted)
        if isinstance(child, nn.Linear) and not stays:
            setattr(module, name, _bnb_layer(child, config))
            replaced = True
        elif not stays:
            replaced |= _replace_below(child, config, unconverted, [*path, name])
    return replaced


def _bnb_layer(layer: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    import bitsandbytes as bnb

    has_bias = layer.bias is not None
    if config.load_in_8bit:
        made = bnb.nn.Linear8bitLt(
            layer.in_features,
            layer.out_features,
            has_bias,
            has_fp16_weights=False,
            threshold=config.llm_int8_threshold,
        )
    elif config.load_in_4bit:
        made = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            has_bias,
            compute_dtype=config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
        )
    else:
        raise ValueError("Set load_in_8bit or load_in_4bit of the BnbQuantizationConfig to True.")
    made.weight.data = layer.weight.data
    if has_bias:
        made.bias.data = layer.bias.data
    return made.requires_grad_(False)


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the modules that should keep their precision: the output layer, and those tied to others.

    Args:
        model: The model; its tensors may be on the meta device.
    """
    groups = find_tied_parameters(model)
    tied = [name.rpartition(".")[0] for group in groups for name in group]
    prefix = getattr(model, "base_model_prefix", None)
    is_base = prefix is not None and not hasattr(model, prefix)
    if not tied and is_base:
        return []  # the bare body of a model has no output layer
    *_, (last, _) = model.named_children()
    return list(dict.fromkeys([*tied, last]))


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Say whether a model has 4-bit layers of bitsandbytes.

    Args:
        model: Any module.
    """
    import bitsandbytes as bnb

    return any(isinstance(module, bnb.nn.Linear4bit) for module in model.modules())


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of a module's first parameter.

    Args:
        parameter: A module with parameters.
    """
    return next(parameter.parameters()).device
