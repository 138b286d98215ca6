"""The meeting point of one machine."""

import os
import signal
import types

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
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


class Processes:
    """A stand-in for torch's started processes: those that have ended have a status."""

    def __init__(self, *statuses):
        handlers = [
            types.SimpleNamespace(proc=types.SimpleNamespace(poll=lambda status=status: status)) for status in statuses
        ]
        self.subprocess_handlers = dict(enumerate(handlers))

    def pids(self):
        return {rank: 1000 + rank for rank in self.subprocess_handlers}


@pytest.fixture
def agent(monkeypatch):
    """An agent whose processes are stand-ins; `sent` lists what it sends."""
    agent = object.__new__(elastic.Agent)
    agent._received, agent._forwarded, agent._ending_since, agent._pcontext = {}, set(), None, None
    agent._remaining_restarts, agent.sent = 3, []
    monkeypatch.setattr(os, "kill", lambda process, number: agent.sent.append((process, number)))
    healthy = lambda self, group: RunResult(state=WorkerState.HEALTHY)  # noqa: E731
    monkeypatch.setattr(elastic.LocalElasticAgent, "_monitor_workers", healthy)
    monkeypatch.setattr(elastic.LocalElasticAgent, "__del__", lambda self: None, raising=False)
    return agent


def test_a_signal_is_passed_on_once(agent, monkeypatch):
    agent._pcontext = Processes(None, None)
    agent.forward(signal.SIGTERM)
    agent.forward(signal.SIGTERM)
    assert agent.sent == [(1000, signal.SIGTERM), (1001, signal.SIGTERM)]
    monkeypatch.setattr(elastic, "_REPEAT_S", 0.0)
    with pytest.raises(SignalException) as caught:
        agent.forward(signal.SIGTERM)
    assert caught.value.sigval == signal.SIGTERM


def test_a_signal_that_comes_before_the_processes_waits_for_them(agent):
    agent.forward(signal.SIGUSR1)
    assert agent.sent == []
    agent._pcontext = Processes(None)
    agent._monitor_workers(None)
    assert agent.sent == [(1000, signal.SIGUSR1)] and agent._remaining_restarts == 0


@pytest.mark.parametrize(
    ("statuses", "waits"),
    [((75, None), True), ((75, 0, None), True), ((75, 75), False), ((None, None), False), ((75, 1, None), False)],
)
def test_the_others_may_end_by_themselves(agent, statuses, waits):
    agent._pcontext = Processes(*statuses)
    assert agent._is_ending() is waits
    agent._monitor_workers(None)
    assert (agent._remaining_restarts == 0) is (75 in statuses)


def test_they_do_not_have_for_ever(agent, monkeypatch):
    monkeypatch.setattr(elastic, "_ENDING_S", 0.0)
    agent._pcontext = Processes(75, None)
    assert not agent._is_ending()


def test_processes_that_did_not_listen_are_reported_as_stopped(agent, monkeypatch):
    failure = types.SimpleNamespace(exitcode=-signal.SIGTERM)
    failed = RunResult(state=WorkerState.FAILED, failures={0: failure})
    monkeypatch.setattr(elastic.LocalElasticAgent, "_monitor_workers", lambda self, group: failed)
    monkeypatch.setattr(os, "killpg", lambda process, number: agent.sent.append(("group", process, number)))
    agent._pcontext = Processes(-15)
    assert agent._monitor_workers(None) is failed
    agent.forward(signal.SIGTERM)
    with pytest.raises(SignalException):
        agent._monitor_workers(None)
    assert agent.sent[-1] == ("group", 1000, signal.SIGTERM)


def test_handlers_are_there_during_a_run_alone():
    before = signal.getsignal(signal.SIGTERM)
    with elastic._forwarding():
        assert signal.getsignal(signal.SIGTERM) is elastic._forward and elastic.api.LocalElasticAgent is elastic.Agent
        with pytest.raises(SignalException):  # nothing has been started yet
            elastic._forward(signal.SIGTERM, None)
    assert signal.getsignal(signal.SIGTERM) is before
    assert elastic.api.LocalElasticAgent is elastic.LocalElasticAgent
