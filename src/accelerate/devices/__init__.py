"""The hardware axis: one row per kind of device, and which one this machine has."""

from accelerate.base._lazy import front

# `cores` needs no torch, which `table` imports.
__getattr__, __dir__, __all__ = front(__name__, {"accelerate.devices.table": "DEVICES Device detect register row"}, [])
