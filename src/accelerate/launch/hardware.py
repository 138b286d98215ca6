"""What this machine offers: devices and cores. Nothing here imports torch at once."""

import ctypes
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from accelerate.devices.cores import usable_cores as usable_cores

# Packages that bring a device that torch does not know; only torch can then say what is there.
_PLUGINS = (
    "torch_tpu torch_npu torch_mlu torch_sdaa torch_musa habana_frameworks torch_neuronx intel_extension_for_pytorch"
)
_NO_DRIVER = 9  # NVML_ERROR_DRIVER_NOT_LOADED: then CUDA does not work either


@dataclass(frozen=True)
class Hardware:
    """The devices that a run can use.

    Attributes:
        device: torch's name of their kind: "cuda", "xpu", ..., "mps" or "cpu".
        count: how many there are; 0 for "cpu".
        visible_env: the variable that selects among them, or None.
        shareable: several processes may use one of them.
    """

    device: str
    count: int
    visible_env: str | None = None
    shareable: bool = False


def detect(environ: Mapping[str, str]) -> Hardware:
    """Find the devices of this machine that the variables leave visible.

    The driver's own library says in a millisecond that there is no NVIDIA GPU, or a single one. Torch, which several processes need
    anyway, is asked where there are more or a variable selects among them, if it was built for other devices, a vendor's plug-in
    is installed, or that library is missing and CUDA's is not.
    """
    if "torch" in sys.modules or sys.platform == "darwin" or any(map(importlib.util.find_spec, _PLUGINS.split())):
        return _ask_torch()
    # What torch was built for, from its version file, since importing torch would cost a second.
    text = pathlib.Path(importlib.util.find_spec("torch").origin).with_name("version.py").read_text(encoding="utf-8")
    kinds = set(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"][^'\"]", text, re.M))
    count = _nvidia_gpus() if kinds == {"cuda"} else 0
    if kinds - {"cuda"} or count not in (0, 1) or (count and "CUDA_VISIBLE_DEVICES" in environ):
        return _ask_torch()
    return Hardware("cuda", 1, "CUDA_VISIBLE_DEVICES") if count else Hardware("cpu", 0)


def _nvidia_gpus() -> int | None:
    """Count the NVIDIA GPUs of this machine; None if only torch can do so."""
    library = _library("libnvidia-ml.so.1", "nvml.dll")
    status = library and library.nvmlInit_v2()
    if status != 0:
        # Containers without the utility capability and Jetson boards may have CUDA's own library alone.
        return None if status != _NO_DRIVER and _library("libcuda.so.1", "nvcuda.dll") else 0
    try:
        count = ctypes.c_uint()
        return count.value if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else None
    finally:
        library.nvmlShutdown()


def _library(posix: str, windows: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(posix if os.name == "posix" else windows)
    except OSError:
        return None


def _ask_torch() -> Hardware:
    from accelerate.devices.table import detect as detect_device

    device = detect_device()
    if device.type == "cpu":
        return Hardware("cpu", 0)
    return Hardware(device.type, device.count(), device.visible_env, device.shareable)
