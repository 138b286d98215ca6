"""Which processors a process gets, on machines that are made of files."""

import os
import subprocess
import sys
import types

import pytest
import torch

from accelerate.extensions.affinity import binding as affinity
from cases import cases


@pytest.fixture
def machine(tmp_path):
    """Four nodes with eight processors each; a GPU at each socket's first node."""

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    for node in range(4):
        first = 4 * node
        write(f"devices/system/node/node{node}/cpulist", f"{first}-{first + 3},{first + 16}-{first + 19}")
    write("bus/pci/devices/0000:1b:02.0/numa_node", 0)
    write("bus/pci/devices/0000:ff:00.0/numa_node", 2)
    write("bus/pci/devices/0000:aa:00.0/numa_node", -1)
    write("bus/pci/devices/0000:aa:00.0/local_cpulist", "12-15,28-31")
    return tmp_path


def node(number):
    first = 4 * number
    return {*range(first, first + 4), *range(first + 16, first + 20)}


@cases(
    "address, expected",
    ("0000:FF:00.0", node(2)),
    ("0000:1b:02.0", node(0)),
    ("0000:aa:00.0", node(3)),
    ("0000:00:00.0", set()),
)
def test_processors_near_a_device(machine, address, expected):
    assert affinity.near(address, machine) == expected


@pytest.fixture
def gpu(monkeypatch):
    """A machine with two GPUs, of which torch knows the PCI address."""
    properties = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return properties


def test_gpu_addresses(gpu, monkeypatch):
    assert affinity._address(gpu) == "0000:1b:02.0"
    del gpu.pci_bus_id  # an older torch: nvidia-smi knows it
    gpu.uuid = "abc"
    monkeypatch.setattr(affinity, "ask_nvidia_smi", lambda *question: ["00000000:1B:02.0"])
    assert affinity._address(gpu) == "0000:1b:02.0"


@pytest.fixture
def bound(monkeypatch):
    """What is bound, without binding it."""
    calls = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: calls.append((pid, set(cpus))), raising=False)
    monkeypatch.setattr(affinity, "_threads", lambda: [5, 6])
    affinity.set_numa_affinity.cache_clear()
    yield calls
    affinity.set_numa_affinity.cache_clear()


def test_a_process_is_bound_to_the_node_of_its_gpu_once(gpu, bound, monkeypatch):
    monkeypatch.setattr(affinity, "near", lambda address: {2, 3, 4})
    for _ in range(2):
        affinity.set_numa_affinity(1)
    assert bound == [(5, {2, 3}), (6, {2, 3})]
    affinity.override_numa_affinity(1)
    assert len(bound) == 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    affinity.override_numa_affinity(1)
    assert len(bound) == 4


def test_what_cannot_be_done_is_logged(gpu, bound, monkeypatch, caplog):
    monkeypatch.setattr(affinity, "near", lambda address: set())
    affinity.override_numa_affinity(0)
    assert "Process 0 is not bound to processors: the system does not say" in caplog.text and not bound

    def refuse(pid, cpus):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(affinity, "near", lambda address: {1})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    affinity.override_numa_affinity(0)
    assert "Operation not permitted" in caplog.text


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot bind")
def test_for_real_with_threads_that_run_already():
    program = (
        "import os, threading, types, torch\n"
        "from accelerate.extensions.affinity import binding as affinity\n"
        "go, seen = threading.Event(), []\n"
        "t = threading.Thread(target=lambda: (go.wait(), seen.append(os.sched_getaffinity(0)))); t.start()\n"
        "torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)\n"
        "torch.cuda.get_device_properties, affinity._address = (lambda index: None), (lambda gpu: '')\n"
        "chosen = {min(os.sched_getaffinity(0))}\n"
        "affinity.near = lambda address: chosen\n"
        "affinity.override_numa_affinity(0)\n"
        "go.set(); t.join()\n"
        "assert chosen == os.sched_getaffinity(0) == seen[0], (chosen, seen)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
