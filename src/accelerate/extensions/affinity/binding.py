"""Binding a process to the processors near its GPU.

A processor reaches some memory and some devices faster than others. Linux says in its `sysfs` which belong together; other systems
cannot bind.

Source:
    https://docs.kernel.org/admin-guide/cputopology.html
"""

import functools
import logging
import os
import pathlib
import subprocess
from typing import Any

from accelerate.base.environment import ask_nvidia_smi
from accelerate.devices.cores import SYSTEM, listed

logger = logging.getLogger(__name__)


def near(address: str, root: pathlib.Path = SYSTEM) -> set[int]:
    """Return the processors of a device's memory node, by its PCI address; empty if the kernel does not say."""
    device = root / "bus/pci/devices" / address.lower()
    try:
        number = int((device / "numa_node").read_text())  # -1 where the kernel does not know
    except (OSError, ValueError):
        number = -1
    return listed(root / f"devices/system/node/node{number}/cpulist") or listed(device / "local_cpulist")


def _address(gpu: Any) -> str:
    """Return the PCI address of a GPU, by torch's properties of it."""
    # Asked through torch, whose numbering follows CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER while nvidia-smi's does not.
    if hasattr(gpu, "pci_bus_id"):
        return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    (address,) = ask_nvidia_smi("--query-gpu=pci.bus_id", "--format=csv,noheader", f"--id=GPU-{gpu.uuid}")
    return address.lower()[-12:]  # nvidia-smi writes the domain with eight digits, the kernel with four


def _threads() -> list[int]:
    # Each thread has its own mask: threads that torch has started already would keep the old one.
    return [int(name) for name in os.listdir("/proc/self/task")]


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the processors of the memory node of its GPU, even if it was bound before.

    Does nothing without a CUDA GPU, and only warns where binding is refused. `verbose` is not used: the log says it all.
    """
    import torch

    if not torch.cuda.is_available() or not hasattr(os, "sched_setaffinity"):
        return
    try:
        gpu = torch.cuda.get_device_properties(local_process_index % torch.cuda.device_count())
        processors = near(_address(gpu)) & os.sched_getaffinity(0)
        if not processors:
            raise ValueError("the system does not say which of them are near the GPU")
        for thread in _threads():
            os.sched_setaffinity(thread, processors)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("Process %d is not bound to processors: %s.", local_process_index, error)
    else:
        logger.info("Process %d runs on the processors %s.", local_process_index, sorted(processors))


def bind(state: Any) -> None:
    """Bind the process of a state."""
    set_numa_affinity(state.local_process_index)


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the processors of the memory node of its GPU, once; see `override_numa_affinity`."""
    override_numa_affinity(local_process_index, verbose)
