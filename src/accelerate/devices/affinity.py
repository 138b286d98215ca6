"""Which processors a process may run on: close to its device, and if asked not those of its neighbours.

A processor reaches some memory and some devices faster than others. A process that the system moves between the sockets of a
machine pays for it with each access. Linux says in its `sysfs` which processors belong together; other systems cannot bind.

Source:
    https://docs.kernel.org/admin-guide/cputopology.html
"""

import contextlib
import functools
import logging
import os
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any

from accelerate.utils.environment import ask_nvidia_smi, get_cpu_distributed_information

logger = logging.getLogger(__name__)

VARIABLE = "ACCELERATE_NUMA_AFFINITY"
NONE, NODE, SOCKET, EXCLUSIVE = "none", "node", "socket", "exclusive"
CHOICES = (NONE, NODE, SOCKET, EXCLUSIVE)
_ROOT = pathlib.Path("/sys")


def _parse_cpu_list(cpu_list_str: str) -> list[int]:
    """Read the kernel's list format, such as "0-3,8"; ValueError if it is not of this form."""
    found: list[int] = []
    for part in filter(None, cpu_list_str.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def processors_in(text: str) -> set[int]:
    """Read the processors of the kernel's list format; raises as `_parse_cpu_list`."""
    return set(_parse_cpu_list(text))


class Topology:
    """The processors of this machine, as far as the mask of this process allows them."""

    def __init__(self, allowed: set[int], root: pathlib.Path = _ROOT) -> None:
        self.allowed, self._root = allowed, root
        self._cpus = root / "devices/system/cpu"

    def nodes(self) -> list[set[int]]:
        """Return the processors of each memory node, in the order of the nodes; one node where the kernel knows of none."""
        folders = (self._root / "devices/system/node").glob("node[0-9]*")
        numbers = sorted(int(folder.name[4:]) for folder in folders if folder.name[4:].isdigit())
        return [cpus for number in numbers if (cpus := self.node(number))] or [set(self.allowed)]

    def node(self, number: int) -> set[int]:
        """Return the processors of a memory node; empty if there is no such node."""
        return self._listed(self._root / f"devices/system/node/node{number}/cpulist")

    def near(self, address: str) -> set[int]:
        """Return the processors near a device, by its PCI address; empty if the kernel does not say."""
        folder = self._root / "bus/pci/devices" / address.lower()
        try:
            number = int((folder / "numa_node").read_text())
        except (OSError, ValueError):
            number = -1  # as the kernel writes where it does not know
        return (self.node(number) if number >= 0 else set()) or self._listed(folder / "local_cpulist")

    def socket_of(self, cpus: set[int]) -> set[int]:
        """Return the processors of the sockets that some of them are in."""
        packages = {self._number(cpu, "physical_package_id") for cpu in cpus}
        return {cpu for cpu in self.allowed if self._number(cpu, "physical_package_id") in packages}

    def cores(self, cpus: set[int]) -> list[list[int]]:
        """Return processors by core: those of one core share its units, so they belong to one process."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for cpu in sorted(cpus):
            siblings = self._listed(self._cpus / f"cpu{cpu}/topology/thread_siblings_list") or {cpu}
            groups.setdefault(tuple(sorted(siblings)), []).append(cpu)
        return list(groups.values())

    def _listed(self, path: pathlib.Path) -> set[int]:
        try:
            return processors_in(path.read_text()) & self.allowed
        except (OSError, ValueError):
            return set()

    def _number(self, cpu: int, name: str) -> int:
        try:
            return int((self._cpus / f"cpu{cpu}/topology/{name}").read_text())
        except (OSError, ValueError):
            return 0


def usable_cores(root: pathlib.Path = _ROOT) -> int:
    """Return how many physical cores this process may use: its affinity mask and the limits of its container count."""
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len(Topology(set(mask), root).cores(set(mask)))
    with contextlib.suppress(OSError, ValueError):  # a quota of "max" is no number
        quota, period = (root / "fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def choose(kind: str, index: int, count: int, topology: Topology, devices: Sequence[str] = ()) -> set[int]:
    """Return the processors for process `index` of `count` on a machine, near its device if `devices` names it."""
    places = _places(count, topology, devices)
    mine = places[index]
    if kind == SOCKET:
        return topology.socket_of(mine)
    if kind == NODE:
        return mine
    cores = topology.cores(mine)
    # Processes that share a node share its cores, in the order of the processes.
    sharers = [other for other in range(count) if places[other] == mine]
    position, number = sharers.index(index), len(sharers)
    if number > len(cores):
        return set(cores[position % len(cores)])
    first, last = (len(cores) * place // number for place in (position, position + 1))
    return {cpu for core in cores[first:last] for cpu in core}


def _places(count: int, topology: Topology, devices: Sequence[str]) -> list[set[int]]:
    """Return the node of each process: its device's, or one after the other."""
    nodes = topology.nodes()
    places = [nodes[index * len(nodes) // count] for index in range(count)]
    if len(devices) == count:
        places = [topology.near(address) or place for address, place in zip(devices, places, strict=True)]
    return places


def bind(
    kind: str, index: int, count: int, devices: Sequence[str] = (), root: pathlib.Path = _ROOT
) -> set[int] | None:
    """Bind this process, with all its threads, to what `choose` finds, and return that; warn where it fails."""
    if kind == NONE:
        return None
    if not hasattr(os, "sched_setaffinity"):
        logger.warning("--numa_affinity %s has no effect: this system cannot bind processes to processors.", kind)
        return None
    try:
        topology = Topology(os.sched_getaffinity(0), root)
        chosen = choose(kind, index, max(count, index + 1), topology, devices)
        for thread in _threads():
            os.sched_setaffinity(thread, chosen)
    except OSError as error:
        logger.warning("Process %d keeps its processors: they cannot be changed (%s).", index, error)
        return None
    logger.info("Process %d runs on the processors %s.", index, sorted(chosen))
    return chosen


def _threads() -> list[int]:
    # Each thread has a mask of its own; those that torch has started already keep the old one otherwise.
    return [int(name) for name in os.listdir("/proc/self/task")]


def bind_from_env(index: int, device_type: str, asked: bool = False) -> bool:
    """Bind this process as the launcher's `--numa_affinity` says, once; return whether that, or `asked`, decides."""
    global _bound
    kind = os.environ.get(VARIABLE, "").strip().lower() or (EXCLUSIVE if asked and device_type == "cpu" else "")
    if kind not in ("", *CHOICES):
        raise ValueError(f"{VARIABLE} is {kind!r}; choose one of {', '.join(CHOICES)}.")
    if not kind or _bound == os.getpid():
        return bool(kind)
    _bound = os.getpid()  # what is left to choose from is less afterwards
    count = get_cpu_distributed_information().local_world_size
    bind(kind, index, count, _devices(count) if device_type == "cuda" else ())
    return True


# The process that was bound.
_bound = 0


def _devices(count: int) -> list[str]:
    """Return the PCI addresses of the processes' GPUs; none if they cannot all be named."""
    import torch

    if torch.cuda.device_count() < count:
        return []
    try:
        return [_address(torch.cuda.get_device_properties(index)) for index in range(count)]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _address(gpu: Any) -> str:
    # Asked through torch, whose numbering follows CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER while nvidia-smi's does not.
    if hasattr(gpu, "pci_bus_id"):
        return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    (address,) = ask_nvidia_smi("--query-gpu=pci.bus_id", "--format=csv,noheader", f"--id=GPU-{gpu.uuid}")
    return address.lower()[-12:]  # nvidia-smi writes the domain with eight digits, the kernel with four


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the processors of the memory node of its GPU, even if it was bound before.

    Does nothing without a CUDA GPU, and only warns where binding is refused. `verbose` is not used: the log says it all.
    """
    import torch

    if torch.cuda.is_available():
        count = max(get_cpu_distributed_information().local_world_size, local_process_index + 1)
        bind(NODE, local_process_index, count, _devices(count))


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the processors of the memory node of its GPU, once; see `override_numa_affinity`."""
    override_numa_affinity(local_process_index, verbose)
