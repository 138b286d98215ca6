"""Quantising models to 8 or 4 bit with bitsandbytes while they are loaded."""

import copy
import logging
import os
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from accelerate.big_modeling import dispatch_model, init_empty_weights
from accelerate.config.enums import CustomDtype
from accelerate.extensions.big_models.device_map import check_device_map, computed_map
from accelerate.extensions.big_models.loading import CheckpointLoad
from accelerate.extensions.big_models.placement import Device, default_device, quantizes, set_module_tensor_to_device
from accelerate.extensions.big_models.tensors import device_of, find_tied_parameters, listed
from accelerate.extensions.quantize.config import BnbQuantizationConfig, is_4bit_bnb_available, is_8bit_bnb_available

logger = logging.getLogger("accelerate.utils.bnb")  # the public path

_PACKED_ROWS, _PACKED_COLUMNS = 32, 64


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
    """Replace a model's linear layers by quantised ones, load its weights and move it to its devices.

    Modules on ``"disk"``, and on ``"cpu"`` if an accelerator computes, are offloaded. With 8 bits their weights are stored
    quantised; with 4 bits they stay unquantised. Arguments are checked before the model is changed.

    Not a collective.

    Args:
        model: The model, changed in place; best made under `init_empty_weights`. If it has its weights, those are quantised.
        bnb_quantization_config: The settings of the quantisation.
        weights_location: Checkpoint to load into an empty model, as for `load_checkpoint_in_model`.
        device_map: Module name to device, or one of ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``. None
            puts everything on the device of this process, which may be the CPU.
        no_split_module_classes: For a computed map, names of classes whose instances stay on one device.
        max_memory: For a computed map, the most that each device may take: bytes, or text such as ``"2GiB"``.
        offload_folder: The folder for weights whose device is ``"disk"``.
        offload_state_dict: As for `load_checkpoint_in_model`.

    Returns:
        The same model, with the attributes ``is_loaded_in_8bit`` and ``is_loaded_in_4bit``.

    Raises:
        ImportError: bitsandbytes is missing or too old.
        RuntimeError: The model is empty and there is no ``weights_location``, or bitsandbytes does not know the device.
        ValueError: The device map does not fit the model, sends 4-bit layers to the disk, or lacks an ``offload_folder``; or the
            checkpoint does not fit the model, or lacks some of its weights.

    Example:
        With bitsandbytes installed, and a checkpoint of the model in a folder::

            config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
            with init_empty_weights():
                model = build_model()
            model = load_and_quantize_model(model, config, "checkpoint")

    Source: LLM.int8() (arXiv 2208.07339), QLoRA (arXiv 2305.14314)
    """
    if not isinstance(bnb_quantization_config, BnbQuantizationConfig):
        raise ValueError(
            f"bnb_quantization_config={bnb_quantization_config!r} is no BnbQuantizationConfig. Give one, such as "
            "BnbQuantizationConfig(load_in_8bit=True)."
        )
    bits, available = (
        (8, is_8bit_bnb_available) if bnb_quantization_config.load_in_8bit else (4, is_4bit_bnb_available)
    )
    if not available():
        raise ImportError(
            f"load_in_{bits}bit=True needs bitsandbytes, which is missing or too old; install it with `pip install -U bitsandbytes`."
        )
    config = _settled(model, bnb_quantization_config, device_map)
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty and weights_location is None:
        raise RuntimeError(
            f"{len(empty)} parameters of the model are on the meta device, such as {empty[0]!r}, and weights_location is None: "
            "give the checkpoint to load."
        )
    placed = None
    if empty or device_map is not None:
        placed = get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
        check_device_map(model, placed)
        on_disk = [repr(name) for name, device in placed.items() if device == "disk"]
        if on_disk and offload_folder is None:
            raise ValueError(
                f"device_map sends {listed(on_disk, 5)} to disk: give an `offload_folder` to put them in."
            )
    if empty:
        with init_empty_weights():
            replace_with_bnb_layers(model, config, [*config.skip_modules, *config.keep_in_fp32_modules])
        options = {"keep_in_fp32_modules": config.keep_in_fp32_modules, "whole": True}
        options["offload_8bit_bnb"] = config.load_in_8bit and bool(_offloaded(placed))
        CheckpointLoad(model, weights_location, placed, offload_folder, config.torch_dtype, **options).run()
    else:
        _quantize_in_place(model, config, placed, ignored=weights_location)
    model.is_loaded_in_4bit = config.load_in_4bit
    model.is_loaded_in_8bit = config.load_in_8bit
    if placed is None:
        return model.to(default_device())
    return dispatch_model(model, device_map=placed, offload_dir=offload_folder)


def _settled(
    model: nn.Module, requested: BnbQuantizationConfig, device_map: str | dict[str, Device] | None
) -> BnbQuantizationConfig:
    """A copy of the configuration that says of every module whether it is quantised."""
    config = copy.copy(requested)
    names = [f".{name}." for kind in (model.named_modules(), model.named_parameters()) for name, _ in kind]
    for field, mark in (("skip_modules", "."), ("keep_in_fp32_modules", "")):
        parts = getattr(requested, field) or []
        unknown = [part for part in parts if not any(mark + part + mark in name for name in names)]
        if unknown:
            logger.warning("%s names %s: no effect, the model has no such module.", field, unknown)
    if config.skip_modules is None:
        # Output layers decide between tokens by small differences.
        config.skip_modules = get_keys_to_not_convert(model)
    if config.load_in_4bit and isinstance(device_map, dict) and len(device_map) > 1:
        config.skip_modules = [*config.skip_modules, *_offloaded(device_map)]
    config.keep_in_fp32_modules = config.keep_in_fp32_modules or []
    return config


def _offloaded(device_map: Mapping[str, Device]) -> list[str]:
    """The modules of a map whose weights are elsewhere between forwards: not those on the CPU if it is the CPU that computes."""
    elsewhere = ("disk",) if _compute_device(device_map) == "cpu" else ("cpu", "disk")
    return [name for name, device in device_map.items() if str(device) in elsewhere]


def _compute_device(device_map: Mapping[str, Device]) -> Device:
    return next((device for device in device_map.values() if str(device) not in ("cpu", "disk")), "cpu")


def _quantize_in_place(
    model: nn.Module,
    config: BnbQuantizationConfig,
    device_map: dict[str, Device] | None,
    ignored: str | os.PathLike | None,
) -> None:
    logger.warning(
        "The model has its weights already, so they are quantised as they are%s. Make it under `init_empty_weights` to save "
        "memory.",
        "" if ignored is None else f", and weights_location={os.fspath(ignored)!r} is not read",
    )
    replace_with_bnb_layers(model, config, [*config.skip_modules, *config.keep_in_fp32_modules])
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            kept = any(part in name for part in config.keep_in_fp32_modules)
            parameter.data = parameter.data.to(torch.float32 if kept else config.torch_dtype)
    computes = default_device() if device_map is None else _compute_device(device_map)
    for name, parameter in list(model.named_parameters()):
        if quantizes(parameter):
            device = computes if device_map is None else device_of(name, device_map)
            # Offloaded modules are quantised on the device that computes them.
            for step in (computes, "cpu") if str(device) in ("cpu", "disk") else (device,):
                set_module_tensor_to_device(model, name, step)


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: str | dict[str, Device] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
) -> dict[str, Device]:
    """Return the device map of a model that will be quantised, computed for its quantised size.

    Args:
        model: The model, on the meta device.
        bnb_quantization_config: The settings of the quantisation.
        device_map: A map to check, the name of a method to compute one, or None: everything on the device of this process.
        max_memory: For a computed map, the most that each device may take.
        no_split_module_classes: For a computed map, names of classes whose instances stay on one device.

    Raises:
        ValueError: The name is unknown, or 4-bit layers would be offloaded to the CPU or the disk.

    Example:
        >>> config = BnbQuantizationConfig(load_in_8bit=True)
        >>> with init_empty_weights():
        ...     model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> dict(get_quantized_model_device_map(model, config, "auto", max_memory={"cpu": "1GiB"}))
        {'': 'cpu'}
    """
    config = bnb_quantization_config
    if device_map is None:
        device = default_device()
        return {"": device.type if device.index is None else device.index}
    in_fp32 = config.keep_in_fp32_modules or []
    stay = [*(config.skip_modules or []), *in_fp32]
    if not isinstance(device_map, Mapping):
        quantised = {f"{name}.weight" for _, name, _ in _convertible(model, stay, [])}
        # Embeddings, norms and biases are not quantised, and count with their own size.
        special = {
            name: torch.float32 if any(part in name for part in in_fp32) else config.torch_dtype
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name not in quantised and not quantizes(parameter)
        }
        dtype = CustomDtype.INT4 if config.load_in_4bit else torch.int8
        options = {"special_dtypes": special, "no_split_module_classes": no_split_module_classes, "dtype": dtype}
        device_map = computed_map(model, device_map, max_memory, **options)
    elsewhere = [f"{name!r} to {device_map[name]}" for name in _offloaded(device_map) if name not in stay]
    if elsewhere and config.load_in_4bit:
        raise ValueError(
            f"device_map offloads {listed(elsewhere, 5)}, and 4-bit layers are not offloaded while they are loaded. Give devices "
            "more `max_memory`, quantise to 8 bits, pass your own device_map, whose offloaded modules then stay unquantised, "
            "or load everything to one device and offload it with `dispatch_model`."
        )
    return device_map


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> nn.Module:
    """Replace the linear layers of a model by layers of bitsandbytes that hold the same weights, not yet quantised.

    Args:
        model: The model, changed in place.
        bnb_quantization_config: The kind of layer, and its options.
        modules_to_not_convert: Names of modules to keep, in full or as a part of the full name.
        current_key_name: Parts of the name of ``model`` in a larger one.

    Returns:
        The same model. Its layers are quantised when they are moved, even to their current device.

    Raises:
        ImportError: bitsandbytes is missing.
    """
    return _replace_with_bnb_layers(model, bnb_quantization_config, modules_to_not_convert, current_key_name)[0]


def _replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> tuple[nn.Module, bool]:
    """Do what `replace_with_bnb_layers` does, and return whether there was a layer to replace, too."""
    convertible = list(_convertible(model, list(modules_to_not_convert or ()), list(current_key_name or ())))
    converted: dict[nn.Linear, nn.Module] = {}
    for parent, name, layer in convertible:
        if layer not in converted:  # else it is shared, and stays so
            converted[layer] = _bnb_layer(layer, bnb_quantization_config)
        setattr(parent, name.rpartition(".")[2], converted[layer])
        if isinstance(parent, nn.TransformerEncoderLayer):
            # Its fused kernel reads the weights of its linear layers itself; without a known activation it is not used.
            parent.activation_relu_or_gelu = 0
    if not convertible:
        logger.warning("%s has no linear layer to quantise; it stays as it is.", type(model).__name__)
    return model, bool(convertible)


def _convertible(
    module: nn.Module, unconverted: Sequence[str], path: Sequence[str]
) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers that are to be quantised, each with the module that has it and its full name."""
    for name, child in module.named_children():
        full = ".".join([*path, name])
        if any(full == part or f".{part}." in f".{full}." for part in unconverted):
            continue
        if not isinstance(child, nn.Linear):
            yield from _convertible(child, unconverted, [*path, name])
        # nn.MultiheadAttention reads the weight of its output layer itself; quantised layers are not changed.
        elif not isinstance(child, NonDynamicallyQuantizableLinear) and not _is_quantised(child):
            yield module, full, child


def _is_quantised(layer: nn.Linear) -> bool:
    weight = layer.weight
    return quantizes(weight) and (weight.dtype is torch.int8 or getattr(weight, "quant_state", None) is not None)


def _bnb_layer(layer: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    import bitsandbytes as bnb

    size = (layer.in_features, layer.out_features, layer.bias is not None)
    with torch.device("meta"):  # its initial values are not needed
        if config.load_in_8bit:
            bnb_layer = bnb.nn.Linear8bitLt(*size, has_fp16_weights=False, threshold=config.llm_int8_threshold)
        else:
            bnb_layer = bnb.nn.Linear4bit(
                *size,
                compute_dtype=config.bnb_4bit_compute_dtype,
                compress_statistics=config.bnb_4bit_use_double_quant,
                quant_type=config.bnb_4bit_quant_type,
            )
    if layer.out_features % _PACKED_ROWS or layer.in_features % _PACKED_COLUMNS:
        # On some CPUs bitsandbytes packs 4-bit weights in tiles for evaluation, and fails where none fits.
        bnb_layer.support_avx512bf16_for_cpu = False
    empty = bnb_layer.weight
    bnb_layer.weight = type(empty)(layer.weight.data, requires_grad=False, **empty.__dict__)
    if layer.bias is not None:
        bnb_layer.bias = nn.Parameter(layer.bias.data)
    return bnb_layer.requires_grad_(False).train(layer.training)


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the modules that should keep their precision: the output layer, and those tied to others."""
    tied = [name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group]
    prefix = getattr(model, "base_model_prefix", None)
    if not tied and prefix is not None and not hasattr(model, prefix):
        return []  # the bare body of a model has no output layer
    last = [name for name, _ in model.named_children()][-1:]
    return list(dict.fromkeys([*tied, *last]))


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether a model has 4-bit layers of bitsandbytes."""
    import bitsandbytes as bnb

    return any(isinstance(module, bnb.nn.Linear4bit) for module in model.modules())


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of a module's first parameter."""
    return next(parameter.parameters()).device
