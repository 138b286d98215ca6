"""Finding out cheaply whether a module's inputs have to move at all."""

from collections.abc import Mapping
from typing import Any

import torch

from accelerate.devices import probe
from accelerate.offload.placement import Device, as_device

# Types of arguments that hold no tensors and have no `to`; others join when they are first seen.
_INERT: set[type] = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}


def exact_device(device: Device) -> torch.device:
    """Return a device with the index that tensors on it tell, so that the two compare equal.

    Args:
        device: The device, as it stands in a device map.
    """
    found = as_device(device)
    if found.index is None and found.type not in ("cpu", "meta"):
        return torch.empty(0, device=found).device
    return found


def check_devices(device_map: Mapping[str, Any]) -> None:
    """Refuse a device map that names devices which this machine does not have.

    Args:
        device_map: Module names to devices; ``"disk"`` is none.

    Raises:
        ValueError: A device is not there, or is no device.
    """
    for device in dict.fromkeys(device for device in device_map.values() if device != "disk"):
        found = as_device(device)
        if found.type in ("cpu", "meta"):
            continue
        kind = probe.row(found.type)
        count = kind.count() if kind.available() else 0
        if (found.index or 0) >= count:
            module = next(name for name, value in device_map.items() if value == device)
            raise ValueError(
                f"The device_map puts {module or 'the model'!r} on {device!r}, but this machine has {count} {found.type} "
                "devices. Use 'cpu' or 'disk', or device_map='auto'."
            )


def any_elsewhere(value: Any, device: torch.device) -> bool:
    """Say whether something among a forward's arguments may have to move to a device.

    Args:
        value: Arguments: tensors, nested in tuples, lists and dicts, and anything else.
        device: The device, as `exact_device` returns it.

    Returns:
        False if all tensors are there. True also for objects that nobody can look into, such as batches with a `to` of their
        own.

    Example:
        >>> any_elsewhere((torch.ones(1), {"past": None}), torch.device("cpu"))
        False
    """
    kind = type(value)
    if kind in _INERT:
        return False
    if kind is tuple or kind is list:
        for item in value:  # noqa: SIM110 - a generator costs more than the look
            if any_elsewhere(item, device):
                return True
        return False
    if kind is dict:
        for item in value.values():  # noqa: SIM110
            if any_elsewhere(item, device):
                return True
        return False
    if isinstance(value, torch.Tensor):
        return value.device != device
    if hasattr(value, "to") or isinstance(value, (tuple, list)) or hasattr(value, "keys"):
        return True
    _INERT.add(kind)
    return False
