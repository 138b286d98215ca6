"""What this machine offers: devices, cores, and addresses that other machines reach. Nothing here imports torch at once."""

import contextlib
import ctypes
import importlib.util
import os
import pathlib
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from accelerate.devices.cores import usable_cores as usable_cores
from accelerate.launch.errors import RunError

# Packages that bring a device that torch does not know; only torch can then say what is there.
_PLUGINS = (
    "torch_tpu torch_npu torch_mlu torch_sdaa torch_musa habana_frameworks torch_neuronx intel_extension_for_pytorch"
)
# Addresses that are set aside for documentation (RFC 5737, RFC 3849): no machine has them, so the way to them is the way out.
_OUTSIDE = ((socket.AF_INET, ("192.0.2.1", 9)), (socket.AF_INET6, ("2001:db8::1", 9)))
_NO_DRIVER = 9  # NVML_ERROR_DRIVER_NOT_LOADED: then CUDA does not work either


# -- devices and cores -------------------------------------------------------------------------------------------------


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


def is_bound() -> bool:
    """Return whether this process is bound to some of the machine's cores."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


# -- addresses ---------------------------------------------------------------------------------------------------------


def local_address(towards: str, port: int) -> str:
    """Return the address of this machine that another one (`towards`) sees when they talk; nothing is sent.

    Where `towards` is a name of this machine for which the system has a loopback address, as Debian does, it is one
    that other machines may use as well. A RunError says that there is no such name, or no way there.
    """
    try:
        found = _sources(_addresses(towards, port))
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"The address {towards!r} cannot be looked up: {reason}. Check --main_process_ip.") from None
    if not found:
        raise RunError(f"There is no way from this machine to {towards!r} (--main_process_ip). Check the network.")
    outward = [address for address in found if not _is_loopback(address)]
    if not outward and not _is_loopback(towards) and not towards.lower().rstrip(".").endswith("localhost"):
        outward = _sources(_OUTSIDE)
    return [*outward, *found][0]


def gloo_variables(address: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variable that makes gloo talk through the interface of a local address.

    Left alone, gloo listens at the address of the machine's own name, which Debian writes down as 127.0.1.1. NCCL is left alone:
    a variable would override what an administrator has written into nccl.conf. Returns nothing where the user has set the
    variable, for a loopback address, and where no interface has the address.
    """
    environ = os.environ if environ is None else environ
    if environ.get("GLOO_SOCKET_IFNAME") or _is_loopback(address):
        return {}
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if address in [entry.address for entry in entries]:
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def is_this_machine(host: str) -> bool:
    """Return whether a name or address is one of this machine."""
    with contextlib.suppress(OSError):
        for family, target in _addresses(host, 0):
            # A socket can be bound to addresses of this machine only.
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(target)
                return True
    return False


def _addresses(host: str, port: int) -> list[tuple[int, tuple]]:
    return [(family, target) for family, *_, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)]


def _sources(targets: Iterable[tuple[int, tuple]]) -> list[str]:
    """Return the own addresses from which the targets are reached."""
    found = []
    for family, target in targets:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            found.append(probe.getsockname()[0])
    return found


def _is_loopback(address: str) -> bool:
    return address == "::1" or re.fullmatch(r"127(\.\d+){3}", address) is not None
