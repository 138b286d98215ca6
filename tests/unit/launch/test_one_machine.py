"""The meeting point of one machine."""

import sys

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from accelerate.launch import one_machine


@pytest.fixture
def meeting():
    parameters = RendezvousParameters(one_machine.ONE_MACHINE, "127.0.0.1:0", "run", 1, 1, timeout=30)
    return one_machine.OneMachineRendezvous(parameters)


def test_port_is_known_once_somebody_listens(meeting):
    info = meeting.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert info.bootstrap_store_info.master_port > 0
    info.store.set("key", "value")
    assert info.store.get("key") == b"value"


def test_restarts_start_empty(meeting):
    first = meeting.next_rendezvous()
    first.store.set("key", "value")
    second = meeting.next_rendezvous()
    assert second.bootstrap_store_info.master_port != first.bootstrap_store_info.master_port
    assert not second.store.check(["key"])


def test_nobody_else_can_join(meeting):
    meeting.set_closed()
    assert meeting.use_agent_store
    assert not meeting.is_closed()
    assert meeting.num_nodes_waiting() == 0
    assert meeting.shutdown()
    assert (meeting.get_backend(), meeting.get_run_id()) == (one_machine.ONE_MACHINE, "run")


@pytest.mark.parametrize(
    ("platform", "variable", "without"),
    [("linux", None, False), ("win32", None, True), ("win32", "1", False), ("linux", "0", True)],
)
def test_torch_for_windows_has_no_libuv(monkeypatch, platform, variable, without):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.delenv("USE_LIBUV", raising=False)
    if variable is not None:
        monkeypatch.setenv("USE_LIBUV", variable)
    assert one_machine.without_libuv() == ({"use_libuv": False} if without else {})


def test_a_store_without_libuv(meeting, monkeypatch):
    monkeypatch.setenv("USE_LIBUV", "0")
    store = meeting.next_rendezvous().store
    store.set("key", "value")
    assert store.get("key") == b"value"
