"""Small functions that programs import from `accelerate.utils.modeling` and `accelerate.utils.other`."""

import contextlib
import functools
import importlib
import logging
import platform
import re
import socket
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accelerate.config.enums import DistributedType
from accelerate.config.handlers import AutocastKwargs
from accelerate.devices.table import detect
from accelerate.precision.amp import autocast_context, precision
from accelerate.runtime.ranks import DEFAULT_PORT
from accelerate.state import AcceleratorState

logger = logging.getLogger("accelerate.utils.other")  # the public path


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


# Distributed types with sharded gradients, or with graphs of a full step, need another search for overflows.
_SCALERS = {
    "FSDP": ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler"),
    "XLA": ("torch_xla.amp", "GradScaler"),
}


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


def merge_dicts(source: dict, destination: dict) -> dict:
    """Merge a nested dict into another one, in place, and return that one; the source's values win.

    Example:
        >>> from accelerate.utils import merge_dicts
        >>> merge_dicts({"a": {"x": 1}}, {"a": {"y": 2}})
        {'a': {'y': 2, 'x': 1}}
    """
    for key, value in source.items():
        if isinstance(value, dict):
            below = destination.get(key)
            destination[key] = merge_dicts(value, below if isinstance(below, dict) else {})
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute by its dotted name, such as ``"encoder.0.weight"``; a missing part is an AttributeError.

    Example:
        >>> import torch
        >>> from accelerate.utils import recursive_getattr
        >>> recursive_getattr(torch.nn.Linear(1, 1), "weight.shape")
        torch.Size([1, 1])
    """
    return functools.reduce(getattr, attr.split("."), obj)


def check_os_kernel() -> None:
    """Warn when the Linux kernel is older than 5.5, on which runs with several processes are known to hang."""
    number = re.match(r"(\d+)\.(\d+)", platform.release())
    if platform.system() == "Linux" and number and tuple(map(int, number.groups())) < (5, 5):
        logger.warning(
            "The Linux kernel %s is older than 5.5; on such kernels processes can hang. Use a newer kernel if they do.",
            platform.release(),
        )


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return over how many devices a model's tensors were split when it was loaded, or None when they were not.

    Args:
        model: A model; transformers sets ``tp_size`` on those loaded with ``tp_plan``, or in the ``distributed_config``
            of their configuration, which may be a dict.
    """
    if hasattr(model, "tp_size"):
        return model.tp_size
    split = getattr(getattr(model, "config", None), "distributed_config", None)
    return split.get("tp_size") if isinstance(split, Mapping) else getattr(split, "tp_size", None)


def move_to_device(state: Any, device: torch.device) -> Any:
    """Return optimizer state with its tensors on a device.

    Args:
        state: A tensor, or lists, tuples and dicts of them, nested; anything else is returned unchanged.
        device: Where the tensors go.
    """
    if isinstance(state, torch.Tensor):
        return state.to(device)
    if isinstance(state, (list, tuple)):
        return type(state)(move_to_device(item, device) for item in state)
    if isinstance(state, dict):
        return type(state)((key, move_to_device(value, device)) for key, value in state.items())
    return state


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a program on this machine listens on a port, by default 29500, where processes meet.

    Example:
        >>> from accelerate.utils import is_port_in_use
        >>> is_port_in_use(1)
        False
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex(("localhost", DEFAULT_PORT if port is None else int(port))) == 0


def get_free_port() -> int:
    """Return a port that no program listens on now. Another program may take it before you do.

    Example:
        >>> from accelerate.utils.other import get_free_port
        >>> 0 < get_free_port() < 65536
        True
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
