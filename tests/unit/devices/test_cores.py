"""How many cores a process may use, on machines that are made of files."""

import os

import pytest

from accelerate.devices.cores import usable_cores
from cases import cases


@pytest.fixture
def machine(tmp_path):
    """Sixteen cores with two processors each."""
    for cpu in range(32):
        path = tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{cpu % 16},{cpu % 16 + 16}\n")
    return tmp_path


SOME = {2, 3, 18, 9}  # a container or a scheduler has said so


@cases(
    "allowed, quota, cores",
    (range(32), "max 100000", 16),
    (range(16), "max 100000", 16),  # one processor of each core
    (SOME, "max 100000", 3),
    (range(32), "400000 100000", 4),
    ({1}, "50000 100000", 1),
)
def test_physical_cores_that_this_process_may_use(machine, monkeypatch, allowed, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)
    (machine / "fs/cgroup").mkdir(parents=True)
    (machine / "fs/cgroup/cpu.max").write_text(f"{quota}\n")
    assert usable_cores(machine) == cores
