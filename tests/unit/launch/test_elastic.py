"""The meeting point of one machine."""

import os

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from accelerate.launch import elastic
from accelerate.launch.plan import Rendezvous


@pytest.fixture
def meeting():
    parameters = RendezvousParameters(elastic.ONE_MACHINE, "127.0.0.1:0", "run", 1, 1, timeout=30)
    return elastic.OneMachineRendezvous(parameters)


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
    assert (meeting.get_backend(), meeting.get_run_id()) == (elastic.ONE_MACHINE, "run")


@pytest.mark.parametrize(("backend", "name"), [("static", elastic.ONE_MACHINE), ("c10d", "c10d")])
def test_config(tmp_path, backend, name):
    config = elastic.make_config(2, Rendezvous(backend, settings={"timeout": "5"}), str(tmp_path), max_restarts=1)
    assert (config.nproc_per_node, config.rdzv_backend, config.max_restarts) == (2, name, 1)
    assert config.rdzv_configs["timeout"] == "5"
    assert config.rdzv_endpoint == "127.0.0.1:0"


def test_log_directory():
    with elastic.log_directory("given") as directory:
        assert directory == "given"
    with elastic.log_directory(None) as directory:
        assert os.path.isdir(directory)
    assert not os.path.exists(directory)


def test_variables_are_those_of_the_run_and_come_back(monkeypatch):
    monkeypatch.setenv("BEFORE", "1")
    seen = {}
    monkeypatch.setattr(elastic, "elastic_launch", lambda config, entry: lambda *args: seen.update(os.environ))
    elastic.start(None, "x", (), {"DURING": "2"})
    assert seen == {"DURING": "2"}
    assert os.environ["BEFORE"] == "1"
    assert "DURING" not in os.environ
