"""What the machine offers, without torch; ways to other machines, and waiting for them."""

import ctypes
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from accelerate.launch import hardware
from accelerate.launch.errors import RunError
from cases import cases

DETECT = hardware.detect  # before the fixture of this folder replaces it
NONE = hardware.Hardware("cpu", 0)
BY_TORCH = hardware.Hardware("npu", 3, "ASCEND_RT_VISIBLE_DEVICES", True)


def driver(count, status=0):
    """Return what answers like NVIDIA's management library."""

    def fill(pointer):
        pointer._obj.value = count
        return 0

    return SimpleNamespace(nvmlInit_v2=lambda: status, nvmlShutdown=lambda: 0, nvmlDeviceGetCount_v2=fill)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a torch that was built for something, and NVIDIA's driver or none."""
    device = SimpleNamespace(type="npu", count=lambda: 3, visible_env=BY_TORCH.visible_env, shareable=True)
    monkeypatch.setattr("accelerate.devices.table.detect", lambda: device)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")

    def have(library, drives_cuda=False, **build):
        lines = [f"{kind}: str | None = {build.get(kind)!r}" for kind in ("cuda", "hip", "xpu")]
        (tmp_path / "torch" / "version.py").write_text("\n".join(["__version__ = '2.9'", *lines]))

        def load(name):
            found = library if name.startswith("libnvidia-ml") else name.startswith("libcuda") and drives_cuda
            if not found:
                raise OSError(name)
            return found

        monkeypatch.setattr(ctypes, "CDLL", load)
        return tmp_path

    return have


ONE = hardware.Hardware("cuda", 1, "CUDA_VISIBLE_DEVICES")


@cases(
    "library, build, selection, found, drives_cuda",
    (driver(1), "cuda", None, ONE, False),
    (driver(4), "cuda", None, BY_TORCH, False),  # several processes need torch anyway
    (driver(1), "cuda", "", BY_TORCH, False),
    (driver(4), "cuda", "GPU-1,GPU-2", BY_TORCH, False),
    (None, "cuda", None, NONE, False),
    (driver(4, status=9), "cuda", None, NONE, True),  # no driver is loaded
    (driver(4, status=18), "cuda", None, BY_TORCH, True),
    (None, "cuda", None, BY_TORCH, True),  # a container without the utility capability, a Jetson board
    (None, "none", None, NONE, True),  # a torch without CUDA
    (driver(0), "cuda", None, NONE, False),
    (driver(4), "none", None, NONE, False),
    (driver(4), "hip", None, BY_TORCH, False),
    (None, "plug-in of a vendor", None, BY_TORCH, False),
)
def test_who_counts_the_devices(machine, library, build, selection, found, drives_cuda):
    folder = machine(library, drives_cuda, **{build: "6.0"})
    if build.startswith("plug-in"):
        (folder / "torch_musa.py").touch()
    assert DETECT({} if selection is None else {"CUDA_VISIBLE_DEVICES": selection}) == found


@pytest.mark.cold
def test_the_real_torch_agrees():
    import torch

    program = "import os, sys; from accelerate.launch.hardware import detect\nassert not {'psutil', 'torch'} & set(sys.modules)\n"
    program += "print(detect(os.environ).count, 'torch' in sys.modules)"
    count, imported = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60).split()
    assert int(count) == torch.cuda.device_count()
    assert imported == "False" or torch.version.cuda is None or int(count)


LOOPBACK, OUTWARD = "127.0.1.1", "10.0.0.5"


@pytest.fixture
def names(monkeypatch):
    """A resolver that knows what a test says, and nothing else."""
    known = {}

    def look_up(host, port, *args, **kwargs):
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, port)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@pytest.fixture
def routes(monkeypatch):
    """Ways to other machines: from which own address one reaches an address."""
    known = {}

    class Probe(socket.socket):
        def connect(self, target):
            if target[0] not in known:
                raise OSError(101, "Network is unreachable")
            self.own = known[target[0]]

        def getsockname(self):
            return self.own, 0

    monkeypatch.setattr(socket, "socket", Probe)
    return known


@pytest.fixture
def interfaces(monkeypatch):
    import psutil

    addresses = {"lo": ["127.0.0.1", "::1"], "eth1": [OUTWARD, "fe80::1%eth1", "aa:bb:cc:dd:ee:ff"]}
    known = {name: [SimpleNamespace(address=text) for text in texts] for name, texts in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_ways_to_other_machines(names, routes):
    # Debian writes the machine's own name as 127.0.1.1 into /etc/hosts, which is of no use to others.
    names |= {"node0": [LOOPBACK], "both": [LOOPBACK, "10.0.0.1"], "far": ["10.9.9.9"]}
    names |= {name: ["127.0.0.1"] for name in ("localhost", "127.0.0.1")}
    routes |= {LOOPBACK: "127.0.0.1", "127.0.0.1": "127.0.0.1", "10.0.0.1": "10.0.0.9"}
    assert hardware.local_address("node0", 1) == "127.0.0.1"  # nothing else is there
    routes["192.0.2.1"] = OUTWARD  # set aside for documentation: no machine has it
    assert hardware.local_address("node0", 1) == OUTWARD
    assert hardware.local_address("both", 1) == "10.0.0.9"
    assert hardware.local_address("localhost", 1) == hardware.local_address("127.0.0.1", 1) == "127.0.0.1"
    assert hardware.is_this_machine("127.0.0.1") and not hardware.is_this_machine("unknown")
    with pytest.raises(RunError, match=r"'nowhere' cannot be looked up.*Name or service not known.*--main_process_ip"):
        hardware.local_address("nowhere", 1)
    with pytest.raises(RunError, match="no way from this machine to 'far'"):
        hardware.local_address("far", 1)


def test_the_interface_of_an_address(interfaces):
    # Nothing of NCCL's: it would override nccl.conf.
    assert hardware.gloo_variables(OUTWARD) == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert hardware.gloo_variables(OUTWARD, {"NCCL_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert hardware.gloo_variables(OUTWARD, {"GLOO_SOCKET_IFNAME": "ib0"}) == {}
    for address in ("127.0.0.1", "::1", "10.1.1.1", "no address"):
        assert hardware.gloo_variables(address, {}) == {}
