"""The hardware axis: one row per kind of device, and which one this machine has."""

from accelerate.base._lazy import front

_HOMES = {"accelerate.devices.device": "Device", "accelerate.devices.table": "DEVICES detect register row"}
# `cores` needs no torch, which `table` imports.
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
