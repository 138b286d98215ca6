"""The hardware axis: one row per kind of device, and which one this machine has."""

from accelerate.devices.probe import detect, row
from accelerate.devices.table import DEVICES, Device

__all__ = ["DEVICES", "Device", "detect", "row"]
