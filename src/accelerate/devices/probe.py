"""Which device this machine has."""

import functools
import os

from accelerate.devices.table import DEVICES, Device
from accelerate.utils.environment import parse_flag_from_env


@functools.cache
def _search() -> Device:
    for device in DEVICES.values():
        # torch_xla may be installed for its compiler alone; ACCELERATE_USE_XPU=false and the like keep an XPU out.
        left_out = device.type == "xpu" and not parse_flag_from_env("ACCELERATE_USE_XPU", True)
        if not left_out and device.available():
            return device
    return DEVICES["cpu"]


def detect(cpu: bool = False) -> Device:
    """Return the kind of device that this process computes on; the search runs once."""
    if cpu or parse_flag_from_env("ACCELERATE_USE_CPU", False):
        return DEVICES["cpu"]
    wanted = os.environ.get("ACCELERATE_TORCH_DEVICE", "").strip()
    return row(wanted) if wanted else _search()


def forget() -> None:
    """Search anew at the next `detect`; for tests, and after devices were hidden or shown."""
    _search.cache_clear()


def row(device_type: str) -> Device:
    """Return the row of a kind of device, such as "cuda:1"; ValueError lists the known ones."""
    name = str(device_type).partition(":")[0]
    if name not in DEVICES:
        raise ValueError(f"The device {str(device_type)!r} is not known; choose one of {', '.join(sorted(DEVICES))}.")
    return DEVICES[name]
