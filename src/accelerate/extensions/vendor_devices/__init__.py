"""Devices of vendors besides NVIDIA, AMD and Apple."""

from accelerate.extension import Spec

SPEC = Spec("vendor_devices", devices="accelerate.extensions.vendor_devices.devices:ROWS")
