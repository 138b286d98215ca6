"""Ways to other machines, and waiting for them."""

import collections
import datetime
import socket
import subprocess
import sys

import pytest

from accelerate.launch import network
from accelerate.launch.errors import RunError

LOOPBACK, OUTWARD = "127.0.1.1", "10.0.0.5"
NAMES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


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
def clock(monkeypatch):
    """Time that passes when the process waits."""
    now = [100.0]
    monkeypatch.setattr(network.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(network.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


@pytest.fixture
def interfaces(monkeypatch):
    import psutil

    entry = collections.namedtuple("entry", "address")
    known = {
        "lo": [entry("127.0.0.1"), entry("::1")],
        "eth1": [entry(OUTWARD), entry("fe80::1%eth1"), entry("aa:bb:cc:dd:ee:ff")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_address_of_this_machine_is_its_own_way(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.socket(family, socket.SOCK_DGRAM).bind((address, 0))
    except OSError:
        pytest.skip(f"this machine has no {address}")
    assert network.local_address(address, 29500) == address
    assert network.is_this_machine(address)


def test_ways_to_other_machines(names, routes):
    # Debian writes the machine's own name as 127.0.1.1 into /etc/hosts, which is of no use to others.
    names |= {"node0": [LOOPBACK], "both": [LOOPBACK, "10.0.0.1"], "far": ["10.9.9.9"]}
    names |= {name: ["127.0.0.1"] for name in ("localhost", "127.0.0.1")}
    routes |= {LOOPBACK: "127.0.0.1", "127.0.0.1": "127.0.0.1", "10.0.0.1": "10.0.0.9"}
    assert network.local_address("node0", 1) == "127.0.0.1"  # nothing else is there
    routes["192.0.2.1"] = OUTWARD  # set aside for documentation: no machine has it
    assert network.local_address("node0", 1) == OUTWARD
    assert network.local_address("both", 1) == "10.0.0.9"
    assert network.local_address("localhost", 1) == network.local_address("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(RunError, match=r"'nowhere' cannot be looked up.*Name or service not known.*--main_process_ip"):
        network.local_address("nowhere", 1)
    with pytest.raises(RunError, match=r"no way from this machine to 'far': Network is unreachable"):
        network.local_address("far", 1)


def test_names_of_this_machine(names):
    names |= {"me": ["127.0.0.1"], "other": ["192.0.2.200", "198.51.100.7"], "two": ["198.51.100.7", "127.0.0.1"]}
    assert network.is_this_machine("me") and network.is_this_machine("two")
    assert not network.is_this_machine("other") and not network.is_this_machine("unknown")


def test_a_name_that_cannot_be_one():
    with pytest.raises(RunError, match="cannot be looked up"):
        network.local_address("a" * 70, 1)
    assert not network.is_this_machine("a" * 70)


def test_the_interface_of_an_address(interfaces):
    assert network.interface_of(OUTWARD) == "eth1" and network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("fe80::1%eth1") == network.interface_of("fe80:0::1") == "eth1"
    assert network.interface_of("10.1.1.1") is None and network.interface_of("no address") is None
    assert network.gloo_variables(OUTWARD) == dict(zip(NAMES, ("eth1", "eth1", "=eth1"), strict=True))
    assert network.gloo_variables(OUTWARD, {"NCCL_SOCKET_IFNAME": "ib0"}) == {}
    for address in ("127.0.0.1", "::1", "10.1.1.1"):
        assert network.gloo_variables(address, {}) == {}


def test_names_and_listeners_that_come_late(monkeypatch, clock):
    outcomes = [socket.gaierror(-2, "Name or service not known")] * 60
    outcomes.append(ConnectionRefusedError(111, "Connection refused"))

    def connect(address, timeout):
        if outcomes:
            raise outcomes.pop(0)
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    lines = []
    network.wait_for("node0", 29500, 600, lines.append)
    assert not outcomes and len(lines) == 2
    assert lines[0] == "waiting for machine 0 at node0, port 29500: Name or service not known (2 of 600 s)"
    assert "(12 of 600 s)" in lines[1]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (TimeoutError("timed out"), "no reply"),
        (OSError("label too long"), "label too long"),
    ],
)
def test_no_answer(monkeypatch, clock, error, reason):
    limits = []

    def connect(address, timeout):
        limits.append(timeout)
        clock[0] += timeout
        raise error

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(TimeoutError, match=f"at 10.0.0.1, port 29500, within 7 s: {reason}. Check") as caught:
        network.wait_for("10.0.0.1", 29500, 7, lambda line: None)
    assert isinstance(caught.value, RunError)
    assert clock[0] - 100 == pytest.approx(7, abs=0.5) and all(0 < limit <= 5 for limit in limits)


@pytest.mark.parametrize("port", [1 << 20, -1])
def test_an_impossible_port_is_no_traceback(port):
    with pytest.raises(network.NoAnswerError, match=f"port {port}"):
        network.wait_for("127.0.0.1", port, 0, lambda line: None)


def test_the_store_of_torch_does_not_mind_a_connection_that_only_looks():
    from torch.distributed import TCPStore

    lines, limit = [], datetime.timedelta(seconds=30)
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)
    network.wait_for("127.0.0.1", server.port, 30, lines.append)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit, wait_for_workers=False)
    client.set("key", "value")
    assert server.get("key") == b"value" and lines == []


def test_importing_loads_no_psutil():
    program = "import sys; import accelerate.launch.network; print({'psutil', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60).strip() == "set()"
