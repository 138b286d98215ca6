"""What this machine offers, found out without importing torch where that is possible."""

import ctypes
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

# Packages that bring a device torch does not know by itself; only torch can then say what is there.
_PLUGINS = (
    "torch_npu",
    "torch_mlu",
    "torch_sdaa",
    "torch_musa",
    "habana_frameworks",
    "torch_neuronx",
    "intel_extension_for_pytorch",
)
_SIBLINGS = pathlib.Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
_QUOTA = pathlib.Path("/sys/fs/cgroup/cpu.max")


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
    """Find the devices of this machine.

    NVIDIA GPUs are counted by the driver's own library, which takes a millisecond. Torch is imported only if it was built
    for other devices, a vendor's plug-in is installed, or a GPU is split (MIG).

    Args:
        environ: the variables; `CUDA_VISIBLE_DEVICES` is honoured.
    """
    if "torch" in sys.modules or any(map(importlib.util.find_spec, _PLUGINS)):
        return _ask_torch()
    kinds = _torch_build()
    if sys.platform == "darwin" or not kinds <= {"cuda"}:
        return _ask_torch()
    count = _nvidia_gpus(environ) if kinds else 0
    if count is None:
        return _ask_torch()
    return Hardware("cuda", count, "CUDA_VISIBLE_DEVICES") if count else Hardware("cpu", 0)


def usable_cores() -> int:
    """Return how many physical cores this process may use (its affinity mask and container limits count)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        ranges = re.findall(r"(\d+)(?:-(\d+))?", _SIBLINGS.read_text())
        allowed //= sum([int(last or first) - int(first) + 1 for first, last in ranges]) or 1
    except OSError:
        pass
    try:
        quota, period = _QUOTA.read_text().split()
        allowed = allowed if quota == "max" else min(allowed, int(quota) // int(period))
    except (OSError, ValueError):
        pass
    return max(1, allowed)


def is_bound() -> bool:
    """Tell whether this process is bound to some of the machine's cores."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


def _torch_build() -> set[str]:
    """Read what torch was built for from its version file, since importing torch would cost a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return set()
    try:
        text = (pathlib.Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return {"unknown"}
    return set(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"][^'\"]", text, re.M))


def _nvidia_gpus(environ: Mapping[str, str]) -> int | None:
    """Count the visible NVIDIA GPUs; None if only torch can tell."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1" if os.name == "posix" else "nvml.dll")
    except OSError:
        return 0
    if library.nvmlInit_v2() != 0:
        return 0
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        if any(_is_split(library, index) for index in range(count.value)):
            return None
        return visible(environ.get("CUDA_VISIBLE_DEVICES"), count.value)
    finally:
        library.nvmlShutdown()


def _is_split(library: ctypes.CDLL, index: int) -> bool:
    handle, now, pending = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return True
    failed = library.nvmlDeviceGetMigMode(handle, ctypes.byref(now), ctypes.byref(pending))
    return failed == 0 and now.value == 1


def visible(selection: str | None, count: int) -> int:
    """Count the devices that a list such as `CUDA_VISIBLE_DEVICES` leaves.

    The driver stops at the first entry that names no device, and a repeated entry hides everything.

    Args:
        selection: the value of the variable; None selects all.
        count: how many devices there are.

    Example:
        >>> visible("1,0,9,2", 4), visible(None, 4), visible("", 4)
        (2, 4, 0)
    """
    if selection is None:
        return count
    kept: set[str] = set()
    for entry in map(str.strip, selection.split(",")):
        if not entry.startswith(("GPU-", "MIG-")) and not (entry.isdigit() and int(entry) < count):
            break
        if entry in kept:
            return 0
        kept.add(entry)
    return len(kept)


def _ask_torch() -> Hardware:
    from accelerate.devices.probe import detect as detect_device

    device = detect_device()
    if device.type == "cpu":
        return Hardware("cpu", 0)
    return Hardware(device.type, device.count(), device.visible_env, device.shareable)
