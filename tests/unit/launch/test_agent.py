"""What our agent does about signals, and about processes that end; with stand-ins for processes."""

import json
import os
import signal
import sys
import types

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.launcher import api

from accelerate.launch import agent as agent_module
from accelerate.launch.agent import Agent, Run, watched
from accelerate.runtime import failure

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")


class Processes:
    """A stand-in for torch's started processes: those that have ended have a status."""

    def __init__(self, folder, *statuses):
        self.statuses = list(statuses)
        self.subprocess_handlers = {
            local: types.SimpleNamespace(proc=types.SimpleNamespace(poll=lambda local=local: self.statuses[local]))
            for local in range(len(statuses))
        }
        self.error_files = {local: str(folder / str(local) / "error.json") for local in range(len(statuses))}
        self.stdouts = self.stderrs = dict.fromkeys(range(len(statuses)), "")
        for local in self.subprocess_handlers:
            (folder / str(local)).mkdir(exist_ok=True)

    def pids(self):
        return {rank: 1000 + rank for rank in self.subprocess_handlers}

    def _close(self, *args, **kwargs):
        self.statuses = [-signal.SIGTERM if status is None else status for status in self.statuses]

    def close(self, *args, **kwargs):
        self._close()


class Told:
    """A reporter that remembers."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))


@pytest.fixture
def agent(monkeypatch, tmp_path):
    """An agent whose processes are stand-ins; `sent` lists what it sends, `told` what it reports."""
    spec = WorkerSpec(
        role="r", local_world_size=2, entrypoint="x", args=(), rdzv_handler=None, max_restarts=3, monitor_interval=0.1
    )
    monkeypatch.setattr(agent_module, "_agents", [])
    agent = Agent(spec, DefaultLogsSpecs(str(tmp_path / "logs")))
    agent._run = Run(Told())
    agent.sent, agent.told = [], agent._run.reporter.calls
    agent.start = lambda *statuses: setattr(agent, "_pcontext", Processes(tmp_path, *statuses))
    monkeypatch.setattr(os, "kill", lambda process, number: agent.sent.append((process, number)))
    monkeypatch.setattr(os, "killpg", lambda group, number: agent.sent.append(("group", group, number)))
    healthy = lambda self, group: RunResult(state=WorkerState.HEALTHY)  # noqa: E731
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", healthy)
    yield agent
    agent._pcontext = None


def test_a_signal_is_passed_on_once(agent, monkeypatch):
    agent.start(None, None)
    agent.forward(signal.SIGTERM)
    agent.forward(signal.SIGTERM)
    assert agent.sent == [(1000, signal.SIGTERM), (1001, signal.SIGTERM)]
    monkeypatch.setattr(agent_module, "_REPEAT_S", 0.0)
    with pytest.raises(SignalException) as caught:
        agent.forward(signal.SIGTERM)
    assert caught.value.sigval == signal.SIGTERM


def test_a_signal_that_comes_before_the_processes_waits_for_them(agent):
    agent.forward(signal.SIGUSR1)
    assert agent.sent == []
    agent.start(None)
    agent._monitor_workers(None)
    assert agent.sent == [(1000, signal.SIGUSR1)] and agent._remaining_restarts == 0


def test_the_first_interrupt_asks_and_the_second_kills(agent):
    agent.start(None, None)
    agent._groups = [1000, 1001]
    with pytest.raises(SignalException) as caught:
        agent.stop(signal.SIGINT)
    assert caught.value.sigval == signal.SIGINT and agent.sent == []
    assert agent.told == [("stopping", signal.SIGINT, 30)]
    agent.stop(signal.SIGINT)
    assert agent.sent == [("group", 1000, signal.SIGKILL), ("group", 1001, signal.SIGKILL)]


def test_an_interrupt_while_processes_are_started_waits_until_all_are_known(agent, monkeypatch):
    """A handler that raises in the middle would make torch forget those that it has started already."""
    group = types.SimpleNamespace(spec=agent._worker_group.spec)

    def starting(self, worker_group):
        self.stop(signal.SIGINT)
        agent.start(None, None)
        return {0: 1000, 1: 1001}

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", starting)
    with pytest.raises(SignalException):
        agent._start_workers(group)
    assert agent._groups == [1000, 1001]


def test_an_interrupt_while_processes_of_a_function_are_started_is_not_forgotten(agent, monkeypatch):
    agent._run = Run()
    group = types.SimpleNamespace(spec=types.SimpleNamespace(entrypoint=print))

    def starting(self, worker_group):
        self.stop(signal.SIGINT)
        return {}

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", starting)
    with pytest.raises(SignalException):
        agent._start_workers(group)


@pytest.mark.parametrize(
    ("statuses", "waits"),
    [((75, None), True), ((75, 0, None), True), ((75, 75), False), ((None, None), False), ((75, 1, None), False)],
)
def test_the_others_may_end_by_themselves(agent, statuses, waits):
    agent.start(*statuses)
    assert agent._is_ending() is waits
    agent._monitor_workers(None)
    assert (agent._remaining_restarts == 0) is (75 in statuses)


def test_they_do_not_have_for_ever(agent, monkeypatch):
    monkeypatch.setattr(agent_module, "ENDING_S", 0.0)
    agent.start(75, None)
    assert not agent._is_ending()


def failed(agent, monkeypatch, **failures):
    result = RunResult(state=WorkerState.FAILED, failures={int(k[1:]): v for k, v in failures.items()})
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda self, group: agent._pcontext.close() or result)
    return result


def process_failure(local, code):
    return types.SimpleNamespace(local_rank=local, exitcode=code, pid=1000 + local, error_file_data={})


def test_processes_that_did_not_listen_are_reported_as_stopped(agent, monkeypatch):
    result = failed(agent, monkeypatch, r0=process_failure(0, -signal.SIGTERM))
    agent.start(-15)
    assert agent._monitor_workers(agent._worker_group) is result
    agent.forward(signal.SIGTERM)
    with pytest.raises(SignalException):
        agent._monitor_workers(agent._worker_group)
    assert agent.sent[-1] == ("group", 1000, signal.SIGTERM)


def test_who_failed_and_who_was_stopped(agent, monkeypatch, tmp_path):
    agent.start(3, None)
    agent._note_who_is_stopped()
    (tmp_path / "0" / failure.FAULTS).write_text("it stood here")
    result = failed(agent, monkeypatch, r0=process_failure(0, 3), r1=process_failure(1, -15))
    agent._monitor_workers(agent._worker_group)
    seen = [result.failures[rank].seen for rank in (0, 1)]
    assert [each.stopped for each in seen] == [False, True]
    assert [each.fault for each in seen] == ["it stood here", ""]
    assert seen[0].time <= seen[1].time
    assert agent.told == [("failed", result.failures, 1, 4)]


def test_the_last_attempt_is_told_apart(agent, monkeypatch):
    agent._remaining_restarts = 0
    agent.start(3)
    result = failed(agent, monkeypatch, r0=process_failure(0, 3))
    agent._monitor_workers(agent._worker_group)
    assert agent.told == [("failed", result.failures, 4, 4)]


def leave(path, **told):
    with open(path, "w") as file:
        json.dump({failure.OURS: {"rank": 7, "traceback": "Traceback ...\nError\n", **told}}, file)


def test_a_process_that_has_failed_and_does_not_end_is_shown(agent, monkeypatch):
    agent.start(None, None)
    leave(agent._pcontext.error_files[1])
    agent._monitor_workers(None)
    assert agent.told == []
    monkeypatch.setattr(agent_module, "_LINGERING_S", -1.0)
    agent._monitor_workers(None)
    assert [call[:2] for call in agent.told] == [("lingers", 7)]


LOST = "RuntimeError: Connection closed by peer"


@pytest.mark.parametrize(
    ("statuses", "left", "waits"),
    [
        ((1, None), {0: LOST}, True),  # the other one has closed the connection, and is about to end
        ((1, None), {0: "ValueError: x"}, False),  # this one is the cause
        ((1, None), {0: LOST, 1: "ValueError: x"}, False),  # and here the other has told it already
        ((1, None), {}, False),  # who left nothing may be the cause
        ((1, 3), {0: LOST}, False),
        ((None, None), {}, False),
    ],
)
def test_who_lost_a_connection_is_not_the_first(agent, monkeypatch, statuses, left, waits):
    agent.start(*statuses)
    for local, text in left.items():
        leave(agent._pcontext.error_files[local], traceback=text)
    assert agent._waits_for_cause() is waits
    monkeypatch.setattr(agent_module, "_CAUSE_S", -1.0)
    assert not agent._waits_for_cause()


def test_tracebacks_are_put_into_the_files_of_the_output(agent, tmp_path):
    agent.start(1, 1)
    logs = {local: str(tmp_path / f"{local}.log") for local in (0, 1)}
    agent._pcontext.stderrs = logs
    leave(agent._pcontext.error_files[0])
    leave(agent._pcontext.error_files[1], shown=True)
    agent._complete_logs()
    assert (tmp_path / "0.log").read_text() == "Traceback ...\nError\n"
    assert not (tmp_path / "1.log").exists()


def test_an_interrupted_run_says_where_it_stood_and_empty_files_go(agent, tmp_path):
    agent.start(-2, -2)
    agent._stopping = signal.SIGINT
    leave(agent._pcontext.error_files[1], interrupt=True)
    (tmp_path / "0" / failure.FAULTS).touch()
    (tmp_path / "1" / failure.FAULTS).write_text("something")
    agent.close()
    (name, told) = agent.told[0]
    assert name == "interrupted" and list(told) == [7]
    assert not (tmp_path / "0" / failure.FAULTS).exists() and (tmp_path / "1" / failure.FAULTS).exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"accelerate": 3}', '{"message": "x"}'])
def test_error_files_of_others_are_no_error(tmp_path, text):
    (tmp_path / "error.json").write_text(text)
    assert agent_module._read(str(tmp_path / "error.json")) is None


def test_handlers_are_there_during_a_run_alone():
    numbers = (*agent_module.FORWARDED, *agent_module.STOPPING)
    before = {number: signal.getsignal(number) for number in numbers}
    with watched(Agent, Run()):
        assert signal.getsignal(signal.SIGTERM) is agent_module._forward
        assert signal.getsignal(signal.SIGINT) is agent_module._stop
        assert api.LocalElasticAgent is Agent
        for handler in (agent_module._forward, agent_module._stop):
            with pytest.raises(SignalException):  # nothing has been started yet
                handler(signal.SIGTERM, None)
    assert {number: signal.getsignal(number) for number in numbers} == before
    assert api.LocalElasticAgent is LocalElasticAgent


def test_nohup_is_respected(monkeypatch):
    monkeypatch.setattr(agent_module, "_hangups_are_ignored", True)
    before = signal.getsignal(signal.SIGHUP)
    with watched(Agent, Run()):
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) == before


def test_a_failed_run_is_swept(agent, monkeypatch):
    swept = []
    monkeypatch.setattr(agent_module, "end_groups", lambda groups, grace: swept.append((list(groups), grace)))
    agent._groups = [5, 6]
    monkeypatch.setattr(agent_module, "_agents", [])
    with pytest.raises(ZeroDivisionError), watched(Agent, Run()):
        agent_module._agents.append(agent)
        raise ZeroDivisionError
    assert swept == [([5, 6], agent_module._ORPHANS_S)]


def test_a_forked_process_has_nobody_to_pass_signals_to(monkeypatch):
    raised = []
    monkeypatch.setattr(agent_module, "_home", -1)
    monkeypatch.setattr(agent_module, "_agents", [types.SimpleNamespace(forward=raised.append)])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(signal, "raise_signal", lambda number: sys.exit(number))
    with pytest.raises(SystemExit):
        agent_module._forward(signal.SIGTERM, None)
    assert raised == []
