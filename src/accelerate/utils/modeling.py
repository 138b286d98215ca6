"""Sizes, device maps, placement and loading of models. The public path of the files in `accelerate.extensions.big_models`."""

import contextlib
import importlib
import logging
from typing import Any

import torch

from accelerate.base._lazy import front
from accelerate.config.enums import DistributedType
from accelerate.config.handlers import AutocastKwargs
from accelerate.devices.table import detect
from accelerate.precision.amp import autocast_context, precision
from accelerate.state import AcceleratorState

# Names of other modules that this module also gives.
_HOMES = {
    "accelerate.base.text": "convert_file_size_to_int",
    "accelerate.modules.offloaded": "has_offloaded_params",
    "accelerate.modules.unwrap": "id_tensor_storage is_peft_model",
    "accelerate.extensions.big_models.device_map": (
        "check_device_map clean_device_map fallback_allocate get_balanced_memory get_max_memory infer_auto_device_map"
    ),
    "accelerate.extensions.big_models.loading": "load_checkpoint_in_model load_offloaded_weights load_state_dict",
    "accelerate.extensions.big_models.placement": (
        "align_module_device check_device_same set_module_tensor_to_device"
    ),
    "accelerate.extensions.big_models.tensors": (
        "_get_proper_dtype calculate_maximum_sizes check_tied_parameters_in_config "
        "check_tied_parameters_on_same_device compute_module_sizes compute_module_total_buffer_size "
        "dtype_byte_size find_tied_parameters get_max_layer_size get_module_leaves "
        "get_module_size_with_ties get_non_persistent_buffers named_module_tensors retie_parameters"
    ),
    "accelerate.extensions.big_models.weights": "get_state_dict_from_offload get_state_dict_offloaded_model",
    "accelerate.base.constants": "SAFE_WEIGHTS_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME",
}
__getattr__, __dir__, _ = front(__name__, _HOMES, [])

# The files in accelerate.extensions.big_models log under this name, because other libraries put filters on it.
logger = logging.getLogger(__name__)

# Distributed types with sharded gradients, or with graphs of a full step, need another search for overflows.
_SCALERS = {
    "FSDP": ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler"),
    "XLA": ("torch_xla.amp", "GradScaler"),
}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> contextlib.AbstractContextManager:
    """Return the autocast context for the device and precision of the current state, or a null context.

    Args:
        native_amp: Whether to use autocast at all.
        autocast_kwargs: Settings for ``torch.autocast``; None: its defaults.

    Raises:
        ValueError: Autocast is wanted and no `Accelerator` was made yet.

    Example:
        >>> from accelerate.utils import get_mixed_precision_context_manager
        >>> with get_mixed_precision_context_manager(native_amp=False):
        ...     torch.ones(1).dtype
        torch.float32
    """
    if not native_amp:
        return contextlib.nullcontext()
    state = AcceleratorState()
    row = precision(state.mixed_precision)
    if row.autocast_dtype is None:
        options = autocast_kwargs.to_kwargs() if autocast_kwargs is not None else {}
        return torch.autocast(state.device.type, **options)
    return autocast_context(state.device.type, row, autocast_kwargs)


def get_grad_scaler(distributed_type: DistributedType | str | None = None, **kwargs: Any) -> Any:
    """Return the gradient scaler that fits a distributed type.

    Args:
        distributed_type: How processes cooperate; None: any type without sharded gradients.
        **kwargs: Passed to the scaler, such as ``init_scale``.

    Example:
        >>> get_grad_scaler(init_scale=2.0, enabled=False).is_enabled()
        False
    """
    kind = str(getattr(distributed_type, "value", distributed_type))
    if kind != "XLA":
        kwargs.setdefault("device", detect().type)
    if kind not in _SCALERS:
        return torch.amp.GradScaler(**kwargs)
    module, name = _SCALERS[kind]
    return getattr(importlib.import_module(module), name)(**kwargs)
