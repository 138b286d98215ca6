"""The hardware axis: one row per kind of device, and which one this machine has."""

from accelerate._lazy import front

# `affinity` needs no torch, which `probe` and `table` import.
__getattr__, __dir__, __all__ = front(
    __name__, {"accelerate.devices.probe": "detect row", "accelerate.devices.table": "DEVICES Device"}, []
)
