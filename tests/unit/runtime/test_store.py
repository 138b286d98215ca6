"""The store at which the processes of a run meet: who can reach it."""

import socket
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from accelerate.runtime import rendezvous
from accelerate.runtime.ranks import Ranks
from accelerate.utils.versions import is_torch_version
from cases import cases

LIMIT = timedelta(seconds=30)


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def listening_at(port):
    found = psutil.Process().net_connections("tcp")
    return {one.laddr.ip for one in found if one.laddr.port == port and one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("libuv", ["1", "0"])
def test_the_store_of_one_machine_is_reached_from_here_alone(monkeypatch, libuv):
    monkeypatch.setenv("USE_LIBUV", libuv)
    server = rendezvous.serve_this_machine(0, LIMIT)
    by_libuv = libuv == "1" and not is_torch_version("<", "2.9")  # which takes no socket of ours
    assert listening_at(server.port) == {rendezvous.LOOPBACK} and server.libuvBackend == by_libuv
    client = dist.TCPStore(rendezvous.LOOPBACK, server.port, is_master=False, wait_for_workers=False)
    client.set("key", "value")
    assert server.get("key") == b"value"
    with pytest.raises(dist.DistNetworkError, match=f"port {server.port}: .*in use"):
        rendezvous.serve_this_machine(server.port, LIMIT)


@pytest.fixture
def place(monkeypatch):
    """Return a function that writes down where the one rank meets itself, and returns the port."""

    def place(address):
        port = free_port()
        for name, value in {"MASTER_ADDR": address, "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
            monkeypatch.setenv(name, str(value))
        return port

    return place


@cases(
    "address, here, found",
    ("127.0.0.1", 1, {"127.0.0.1"}),
    ("localhost", 1, {"127.0.0.1"}),
    ("127.0.0.1", None, {"::"}),  # it is not known that no other machine takes part
)
def test_without_a_launcher_rank_0_serves_likewise(place, address, here, found):
    port = place(address)
    rendezvous.init_process_group(Ranks(0, 1, 0, here, "torchrun"), "gloo")
    try:
        assert listening_at(port) == found
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_groups_of_the_user_share_the_port(place, first):
    place("127.0.0.1")
    theirs = dist.rendezvous("env://", 0, 1)
    starts = [lambda: rendezvous.init_process_group(Ranks(0, 1, 0, 1, "torchrun"), "gloo"), lambda: next(theirs)]
    held = [start() for start in (starts if first == "ours" else starts[::-1])]
    dist.destroy_process_group()
    assert len(held) == 2
