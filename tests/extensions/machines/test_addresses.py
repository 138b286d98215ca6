"""Ways to other machines, with a resolver and routes that a test makes up."""

import socket
from types import SimpleNamespace

import pytest

from accelerate.extensions.machines import addresses
from accelerate.launch.errors import RunError

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

    texts_of = {"lo": ["127.0.0.1", "::1"], "eth1": [OUTWARD, "fe80::1%eth1", "aa:bb:cc:dd:ee:ff"]}
    known = {name: [SimpleNamespace(address=text) for text in texts] for name, texts in texts_of.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_ways_to_other_machines(names, routes):
    # Debian writes the machine's own name as 127.0.1.1 into /etc/hosts, which is of no use to others.
    names |= {"node0": [LOOPBACK], "both": [LOOPBACK, "10.0.0.1"], "far": ["10.9.9.9"]}
    names |= {name: ["127.0.0.1"] for name in ("localhost", "127.0.0.1")}
    routes |= {LOOPBACK: "127.0.0.1", "127.0.0.1": "127.0.0.1", "10.0.0.1": "10.0.0.9"}
    assert addresses.local_address("node0", 1) == "127.0.0.1"  # nothing else is there
    routes["192.0.2.1"] = OUTWARD  # set aside for documentation: no machine has it
    assert addresses.local_address("node0", 1) == OUTWARD
    assert addresses.local_address("both", 1) == "10.0.0.9"
    assert addresses.local_address("localhost", 1) == addresses.local_address("127.0.0.1", 1) == "127.0.0.1"
    assert addresses.is_this_machine("127.0.0.1") and not addresses.is_this_machine("unknown")
    with pytest.raises(RunError, match=r"'nowhere' cannot be looked up.*Name or service not known.*--main_process_ip"):
        addresses.local_address("nowhere", 1)
    with pytest.raises(RunError, match="no way from this machine to 'far'"):
        addresses.local_address("far", 1)


def test_the_interface_of_an_address(interfaces):
    # Nothing of NCCL's: it would override nccl.conf.
    assert addresses.gloo_variables(OUTWARD) == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert addresses.gloo_variables(OUTWARD, {"NCCL_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert addresses.gloo_variables(OUTWARD, {"GLOO_SOCKET_IFNAME": "ib0"}) == {}
    for address in ("127.0.0.1", "::1", "10.1.1.1", "no address"):
        assert addresses.gloo_variables(address, {}) == {}
