"""How many cores a process may use. Linux says in its `sysfs` which processors share a core.

Source:
    https://docs.kernel.org/admin-guide/cputopology.html
"""

import contextlib
import os
import pathlib

SYSTEM = pathlib.Path("/sys")


def _parse_cpu_list(cpu_list_str: str) -> list[int]:
    """Read the kernel's list format, such as "0-3,8"; ValueError if it is not of this form."""
    cores: list[int] = []
    for part in filter(None, cpu_list_str.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def listed(path: pathlib.Path) -> set[int]:
    """Return the processors that a file of the kernel lists; none if it cannot be read."""
    try:
        return set(_parse_cpu_list(path.read_text()))
    except (OSError, ValueError):
        return set()


def usable_cores(root: pathlib.Path = SYSTEM) -> int:
    """Return how many physical cores this process may use: its affinity mask and the limits of its container count."""
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = (root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in mask)
    cores = len({frozenset(listed(path) or {cpu}) for cpu, path in zip(mask, siblings, strict=True)})
    with contextlib.suppress(OSError, ValueError):  # a quota of "max" is no number
        quota, period = (root / "fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)
