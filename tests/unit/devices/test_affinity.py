"""Which processors a process gets, on machines that are made of files."""

import os
import subprocess
import sys
import types

import pytest
import torch

from accelerate.devices import affinity
from accelerate.devices.affinity import Topology, choose
from accelerate.utils import environment
from cases import cases


@pytest.fixture
def machine(tmp_path):
    """Two sockets with two nodes each, four cores a node, two processors a core; a GPU at each socket's first node."""

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    for node in range(4):
        first = 4 * node
        write(f"devices/system/node/node{node}/cpulist", f"{first}-{first + 3},{first + 16}-{first + 19}")
        for core in range(first, first + 4):
            for cpu in (core, core + 16):
                write(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{core},{core + 16}")
                write(f"devices/system/cpu/cpu{cpu}/topology/physical_package_id", node // 2)
    write("bus/pci/devices/0000:1b:02.0/numa_node", 0)
    write("bus/pci/devices/0000:ff:00.0/numa_node", 2)
    write("bus/pci/devices/0000:aa:00.0/numa_node", -1)
    write("bus/pci/devices/0000:aa:00.0/local_cpulist", "12-15,28-31")
    return lambda allowed=range(32): Topology(set(allowed), tmp_path)


def node(number):
    first = 4 * number
    return {*range(first, first + 4), *range(first + 16, first + 20)}


def all_of(kind, count, topology, devices=()):
    return [choose(kind, index, count, topology, devices) for index in range(count)]


DEVICES = ["0000:FF:00.0", "0000:1b:02.0", "0000:aa:00.0"]
SOME = {2, 3, 18, 9}  # a container or a scheduler has said so


@cases(
    "kind, count, allowed, devices, expected",
    ("node", 4, range(32), (), [node(0), node(1), node(2), node(3)]),
    ("node", 2, range(32), (), [node(0), node(2)]),
    ("socket", 2, range(32), (), [node(0) | node(1), node(2) | node(3)]),
    ("node", 2, SOME, (), [{2, 3, 18}, {9}]),
    ("socket", 2, SOME, (), [{2, 3, 18}, {9}]),
    ("exclusive", 1, SOME, (), [{2, 3, 18}]),
    ("exclusive", 3, {0, 1, 2}, (), [{0}, {1}, {2}]),
    ("exclusive", 3, {0, 16, 1}, (), [{0, 16}, {1}, {0, 16}]),  # more processes than cores
    ("node", 3, range(32), DEVICES, [node(2), node(0), node(3)]),
    ("exclusive", 2, range(32), DEVICES[:1] * 2, [{8, 9, 24, 25}, {10, 11, 26, 27}]),
    # A device that the kernel knows nothing about, or whose node this process may not use, is as none.
    ("node", 2, range(32), ["0000:00:00.0", DEVICES[1]], [node(0), node(0)]),
    ("node", 1, {4}, DEVICES[1:2], [{4}]),
)
def test_places(machine, kind, count, allowed, devices, expected):
    assert all_of(kind, count, machine(allowed), devices) == expected


def test_a_machine_without_nodes(tmp_path):
    assert all_of("node", 2, Topology({0, 1, 2}, tmp_path)) == [{0, 1, 2}] * 2
    assert all_of("exclusive", 2, Topology({0, 1, 2}, tmp_path)) == [{0}, {1, 2}]
    assert all_of("socket", 1, Topology({5, 7}, tmp_path)) == [{5, 7}]


@cases(
    "allowed, quota, cores",
    (range(32), "max 100000", 16),
    (range(16), "max 100000", 16),  # one processor of each core
    (SOME, "max 100000", 3),
    (range(32), "400000 100000", 4),
    ({1}, "50000 100000", 1),
)
def test_physical_cores_that_this_process_may_use(machine, monkeypatch, tmp_path, allowed, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    (tmp_path / "fs/cgroup/cpu.max").write_text(f"{quota}\n")
    assert affinity.usable_cores(tmp_path) == cores


@pytest.fixture
def bound(monkeypatch):
    """What is bound, without binding it."""
    calls = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: calls.append((pid, set(cpus))), raising=False)
    monkeypatch.setattr(affinity, "_threads", lambda: [5, 6])
    monkeypatch.setattr(affinity, "_bound", 0)
    for name in (affinity.VARIABLE, "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_what_cannot_be_done_is_logged(bound, monkeypatch, tmp_path, caplog):
    def refuse(pid, cpus):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert affinity.bind("node", 0, 1, root=tmp_path) is None
    monkeypatch.delattr(os, "sched_setaffinity")
    assert affinity.bind("node", 0, 1) is None
    assert "Process 0 keeps its processors" in caplog.text and "--numa_affinity node has no effect" in caplog.text


def told(monkeypatch, index, device="cpu", asked=False, **environ):
    calls = []
    with monkeypatch.context() as patched:
        patched.setattr(affinity, "bind", lambda *args: calls.append(args))
        patched.setattr(affinity, "_bound", 0)
        for name, value in environ.items():
            patched.setenv(name, value)
        return affinity.bind_from_env(index, device, asked), calls


def test_the_variables_of_the_launcher(bound, monkeypatch):
    assert told(monkeypatch, 1) == (False, [])
    assert told(monkeypatch, 1, LOCAL_WORLD_SIZE="2", ACCELERATE_NUMA_AFFINITY="Node") == (True, [("node", 1, 2, ())])
    assert told(monkeypatch, 1, OMPI_COMM_WORLD_LOCAL_SIZE="4", ACCELERATE_NUMA_AFFINITY="socket")[1] == [
        ("socket", 1, 4, ())
    ]
    assert told(monkeypatch, 0, ACCELERATE_NUMA_AFFINITY="exclusive")[1] == [("exclusive", 0, 1, ())]
    assert told(monkeypatch, 0, asked=True)[1] == [("exclusive", 0, 1, ())]
    assert told(monkeypatch, 0, asked=True, ACCELERATE_NUMA_AFFINITY="none")[1] == [("none", 0, 1, ())]
    assert told(monkeypatch, 0, device="cuda", asked=True) == (False, [])  # the recorded function does that
    with pytest.raises(ValueError, match="choose one of none, node"):
        told(monkeypatch, 0, ACCELERATE_NUMA_AFFINITY="moon")


def test_gpus_are_named_by_torch(bound, monkeypatch):
    properties = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert affinity._devices(2) == ["0000:1b:02.0"] * 2
    assert affinity._devices(3) == []  # processes share GPUs
    del properties.pci_bus_id  # an older torch: nvidia-smi knows it
    properties.uuid = "abc"
    monkeypatch.setattr(affinity, "ask_nvidia_smi", lambda *question: ["00000000:1B:02.0"])
    assert affinity._devices(1) == ["0000:1b:02.0"]
    monkeypatch.setattr(affinity, "ask_nvidia_smi", lambda *question: [])
    assert affinity._devices(1) == []


def test_a_process_is_bound_to_the_node_of_its_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(affinity, "bind", lambda *args: asked.append(args))
    monkeypatch.setattr(affinity, "_devices", lambda count: ["gpu"] * count)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)  # noqa: B023
        environment.override_numa_affinity(1)
    environment.set_numa_affinity.cache_clear()
    for _ in range(2):  # once for each process
        environment.set_numa_affinity(2)
    environment.set_numa_affinity.cache_clear()
    assert asked == [("node", 1, 2, ["gpu"] * 2), ("node", 2, 3, ["gpu"] * 3)]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot bind")
def test_for_real_with_threads_that_run_already():
    program = (
        "import os, threading\n"
        "from accelerate.devices import affinity\n"
        "go, seen = threading.Event(), []\n"
        "t = threading.Thread(target=lambda: (go.wait(), seen.append(os.sched_getaffinity(0)))); t.start()\n"
        "chosen = affinity.bind('exclusive', 0, len(os.sched_getaffinity(0)))\n"
        "go.set(); t.join()\n"
        "assert chosen == os.sched_getaffinity(0) == seen[0], (chosen, seen)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
