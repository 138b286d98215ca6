import collections
import socket
import subprocess
import sys

import pytest

from accelerate.launch import network
from accelerate.launch.errors import RunError

LOOPBACK, OUTWARD = "127.0.1.1", "10.0.0.5"


@pytest.fixture
def names(monkeypatch):
    """A resolver that knows what a test tells it, and nothing else."""
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

    def source(family, target):
        if target[0] not in known:
            raise OSError(101, "Network is unreachable")
        return known[target[0]]

    monkeypatch.setattr(network, "_source", source)
    return known


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when somebody sleeps."""
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
    for name in network._INTERFACES:
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


def test_the_way_to_another_machine(names, routes):
    names["node0"] = ["10.0.0.1"]
    routes["10.0.0.1"] = OUTWARD
    assert network.local_address("node0", 1) == OUTWARD


def test_a_name_of_this_machine_that_stands_for_a_loopback_address_is_of_no_use_to_others(names, routes):
    # Debian writes the machine's own name as 127.0.1.1 into /etc/hosts.
    names |= {
        "node0": [LOOPBACK],
        "localhost": ["127.0.0.1"],
        "127.0.0.1": ["127.0.0.1"],
        "both": [LOOPBACK, "10.0.0.1"],
    }
    routes |= {LOOPBACK: "127.0.0.1", "127.0.0.1": "127.0.0.1", "10.0.0.1": "10.0.0.9"}
    assert network.local_address("node0", 1) == "127.0.0.1"  # nothing else is there
    routes[network._OUTSIDE[0][1]] = OUTWARD
    assert network.local_address("node0", 1) == OUTWARD
    assert network.local_address("both", 1) == "10.0.0.9"
    assert network.local_address("localhost", 1) == network.local_address("127.0.0.1", 1) == "127.0.0.1"


def test_a_name_that_nobody_knows_and_an_address_without_a_way(names, routes):
    with pytest.raises(RunError, match=r"'nowhere' cannot be looked up.*Name or service not known.*--main_process_ip"):
        network.local_address("nowhere", 1)
    names["far"] = ["10.9.9.9"]
    with pytest.raises(RunError, match=r"no way from this machine to 'far': Network is unreachable"):
        network.local_address("far", 1)


def test_a_name_that_cannot_be_one():
    with pytest.raises(RunError, match="cannot be looked up"):
        network.local_address("a" * 70, 1)
    assert not network.is_this_machine("a" * 70)


def test_interfaces(interfaces):
    assert network.interface_of(OUTWARD) == "eth1" and network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("fe80::1%eth1") == network.interface_of("fe80:0::1") == "eth1"
    assert network.interface_of("10.1.1.1") is None and network.interface_of("no address") is None


def test_variables_of_the_interface(interfaces):
    assert network.gloo_variables(OUTWARD, {}) == {
        "GLOO_SOCKET_IFNAME": "eth1",
        "TP_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
    }
    assert network.gloo_variables(OUTWARD) == network.gloo_variables(OUTWARD, {})
    assert network.gloo_variables(OUTWARD, {"NCCL_SOCKET_IFNAME": "ib0"}) == {}
    assert network.gloo_variables("127.0.0.1", {}) == network.gloo_variables("::1", {}) == {}
    assert network.gloo_variables("10.1.1.1", {}) == {}


def test_somebody_listens():
    lines = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        network.wait_for("127.0.0.1", server.getsockname()[1], 30, lines.append)
    assert lines == []


def test_names_and_listeners_that_come_late(monkeypatch, clock):
    outcomes = [socket.gaierror(-2, "Name or service not known")] * 60 + [
        ConnectionRefusedError(111, "Connection refused")
    ]
    monkeypatch.setattr(network, "_connect", lambda *_: outcomes and (_ for _ in ()).throw(outcomes.pop(0)))
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
def test_nobody_comes(monkeypatch, clock, error, reason):
    limits = []

    def connect(host, port, seconds):
        limits.append(seconds)
        clock[0] += seconds
        raise error

    monkeypatch.setattr(network, "_connect", connect)
    with pytest.raises(TimeoutError, match=f"at 10.0.0.1, port 29500, within 7 s: {reason}. Check") as caught:
        network.wait_for("10.0.0.1", 29500, 7, lambda line: None)
    assert isinstance(caught.value, RunError)
    assert clock[0] - 100 == pytest.approx(7, abs=0.5) and all(0 < limit <= 5 for limit in limits)


@pytest.mark.parametrize("port", [1 << 20, -1])
def test_an_impossible_port_is_no_traceback(port):
    with pytest.raises(network.NoAnswerError, match=f"port {port}"):
        network.wait_for("127.0.0.1", port, 0, lambda line: None)


def test_names_of_this_machine(names):
    names |= {
        socket.gethostname(): ["127.0.0.1"],
        "other": ["192.0.2.200", "198.51.100.7"],
        "two": ["198.51.100.7", "127.0.0.1"],
    }
    assert network.is_this_machine(socket.gethostname()) and network.is_this_machine("two")
    assert not network.is_this_machine("other") and not network.is_this_machine("unknown")


def test_the_store_of_torch_does_not_mind_who_only_looks(tmp_path):
    from datetime import timedelta

    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    network.wait_for("127.0.0.1", server.port, 30, print)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
    client.set("key", "value")
    assert server.get("key") == b"value"


def test_importing_loads_no_psutil():
    program = "import sys; import accelerate.launch.network; print({'psutil', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60).strip() == "set()"
