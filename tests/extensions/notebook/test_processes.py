"""What a launcher of functions refuses, what runs in its processes, and what the errors of a run become."""

import functools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import types

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from accelerate.extensions.machines.rendezvous import FailedElsewhere
from accelerate.extensions.notebook import processes as notebook
from accelerate.extensions.notebook.processes import MeetingError, Request, Worker, WorkerError, check
from accelerate.launch import elastic
from accelerate.launch.errors import LaunchError, RunError
from accelerate.runtime import failure, storage
from accelerate.runtime.failure import PREEMPTED
from cases import cases

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def train(rate, steps=1):
    pass


@cases(
    "error, message, arguments",
    (TypeError, "function is None, which cannot be called. Pass the function itself", {"function": None}),
    (TypeError, r"args is 5; give a tuple of the function's arguments, as in args=\(5,\)", {"args": 5}),
    (TypeError, r"args is \(\), which does not fit train: missing a required", {"args": ()}),
    (ValueError, "num_processes is 0; it must be at least 1", {"num_processes": 0}),
    (TypeError, "num_processes is '2'; give an integer", {"num_processes": "2"}),
    (ValueError, "mixed_precision is 'fp17'; choose one of no, fp16, bf16, fp8", {"mixed_precision": "fp17"}),
    (ValueError, "rdzv_backend is 'etcd'; choose one of static, c10d", {"rdzv_backend": "etcd"}),
    (ValueError, "monitor_interval is 0; give a number of seconds above 0", {"monitor_interval": 0}),
    (ValueError, "node_rank is 2; 2 machines are numbered from 0", {"node_rank": 2, "num_nodes": 2}),
)
def test_what_is_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        check(Request(**{"function": train, "args": (1,), **arguments}))


@pytest.fixture
def start(monkeypatch):
    """Let torch's launcher do something else; run a request on it."""

    def run(error=None, **arguments):
        def instead(worker, args, environment, processes, rendezvous, log_dir, **settings):
            run.environment = environment
            run.asked = types.SimpleNamespace(processes=processes, rendezvous=rendezvous, **settings)
            if error is not None:
                raise error

        monkeypatch.setattr(elastic, "start", instead)
        notebook.run(Request(train, **arguments), {"A": "1"}, 2)
        return run.asked

    return run


def test_what_the_user_asks_for_arrives(start):
    asked = start(max_restarts=3, monitor_interval=0.5)
    assert (asked.processes, asked.max_restarts, asked.monitor_interval) == (2, 3, 0.5)
    assert (asked.start_method, asked.rendezvous.port, start.environment["A"]) == ("fork", 0, "1")
    assert not hasattr(asked, "run_id")
    c10d = {"rdzv_backend": "c10d", "use_port": 29501, "rdzv_id": "mine", "rdzv_conf": {"timeout": 7}}
    asked = start(**c10d)
    assert (asked.rendezvous.port, asked.rendezvous.settings["timeout"], asked.run_id) == (29501, 7, "mine")


def test_a_taken_port(start):
    error = dist.DistNetworkError("The server socket has failed to listen. name: EADDRINUSE")
    with pytest.raises(MeetingError, match="use_port asks for port 29501, which another program listens at"):
        start(error, use_port=29501)
    with pytest.raises(MeetingError, match="rdzv_endpoint asks for port 29502"):
        start(error, rdzv_endpoint="127.0.0.1:29502")
    with pytest.raises(MeetingError, match="could not meet at 127.0.0.1, port any: The server"):
        start(error)


@cases(
    "error, kind",
    (RunError("Check --main_process_ip and --main_process_port"), MeetingError),
    (LaunchError("--machine_rank is 1 twice"), LaunchError),
    (FailedElsewhere("machine 1: rank 2 ended"), WorkerError),
)
def test_errors_of_several_machines(start, error, kind):
    with pytest.raises(kind, match=f"^{error}$"):
        start(error, num_nodes=2, use_port=29501)


def failed(exitcode):
    return ChildFailedError("train", {0: ProcessFailure(0, 7, exitcode, "nowhere")})


def test_a_process_without_a_traceback(start):
    """Real ones, some of them killed: test_notebook.py."""
    with pytest.raises(
        WorkerError, match="^Rank 0 failed in train:\n\nThe process 7 failed with exit status 3, and left no"
    ) as caught:
        start(failed(3))
    assert (caught.value.exitcode, caught.value.rank, caught.value.traceback) == (3, 0, None)


def test_a_failure_and_those_that_follow(start, tmp_path):
    def ended(rank, code, text, time):
        path = str(tmp_path / str(rank))
        if text:
            record = {"summary": text, "traceback": f"Traceback\n{text}\n", "time": time, "where": "a.py:1 in f"}
            (tmp_path / str(rank)).write_text(json.dumps({"message": "x", failure.OURS: record}))
        one = ProcessFailure(rank, 7, code, path)
        one.died = None if code == -15 else time
        return one

    poisoned = "RuntimeError: Cannot re-initialize CUDA in forked subprocess."
    ranks = {0: ended(0, 1, "RuntimeError: Connection closed by peer", 1.0), 3: ended(3, -15, "", 2.0)}
    ranks |= {rank: ended(rank, 1, poisoned, 1.0 + rank) for rank in (1, 2)}
    with pytest.raises(WorkerError) as caught:
        start(ChildFailedError("train", ranks))
    error = caught.value
    assert str(error) == (
        f"Rank 1 failed in train:\n\nTraceback\n{poisoned}\n\n"
        "rank 2 failed with the same error.\n"
        "rank 0 failed because another rank had gone: RuntimeError: Connection closed by peer"
    )
    assert error._render_traceback_() == [f"WorkerError: {error}"]
    sent = pickle.loads(pickle.dumps(error))
    assert (str(sent), sent.failures) == (str(error), error.failures)
    assert [one.rank for one in error.failures] == [1, 2, 0]  # rank 3 was stopped
    assert (error.rank, error.exitcode, error.traceback) == (1, 1, f"Traceback\n{poisoned}\n")


def test_signals_and_a_run_that_has_saved_itself(start):
    with pytest.raises(SystemExit) as caught:
        start(failed(PREEMPTED))
    assert caught.value.code == PREEMPTED
    for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SignalException)):
        with pytest.raises(kind):
            start(SignalException("x", number))


@forks
@cases(
    "function, status, text",
    (os.getpid, 0, None),
    (sys.exit, 0, None),
    (functools.partial(sys.exit, 3), 3, "SystemExit: 3"),
    (functools.partial(sys.exit, "x"), 1, "SystemExit: x"),
    (functools.partial(sys.exit, PREEMPTED), PREEMPTED, None),
)
def test_ends_with_and_without_a_fault(tmp_path, monkeypatch, function, status, text):
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    worker = Worker(function)
    worker.may_run.set()
    process = multiprocessing.get_context("fork").Process(target=worker)
    process.start()
    process.join(60)
    assert process.exitcode == status and error_file.exists() is (text is not None)
    assert text is None or text in json.loads(error_file.read_text())["accelerate"]["traceback"]


@forks
def test_processes_of_a_start_that_fails_are_killed(monkeypatch):
    started = []

    def half_a_start(self, worker_group):
        process = multiprocessing.get_context("fork").Process(target=signal.pause)
        process.start()
        started.append(process)
        raise OSError("no more processes")

    monkeypatch.setattr(notebook.elastic.Agent, "_start_workers", half_a_start)
    agent = notebook.FunctionAgent.__new__(notebook.FunctionAgent)
    group = types.SimpleNamespace(spec=types.SimpleNamespace(entrypoint=Worker(print)))
    with pytest.raises(OSError, match="no more"):
        agent._start_workers(group)
    assert started[0].exitcode == -signal.SIGKILL


@pytest.fixture
def torch_xla(monkeypatch):
    """torch_xla 2.9 as seen from here: `spawn` runs one process after the other, in this process."""
    library = types.SimpleNamespace(calls=[], initialized=False)

    def spawn(function, args=(), nprocs=None, start_method="spawn"):
        library.calls.append((nprocs, start_method))
        for index in range(nprocs or 2):
            function(index, *args)

    root = types.ModuleType("torch_xla")
    root._XLAC = types.SimpleNamespace(_xla_runtime_is_initialized=lambda: library.initialized)
    starter = types.ModuleType("torch_xla.distributed.xla_multiprocessing")
    starter.spawn = spawn
    for module in (root, types.ModuleType("torch_xla.distributed"), starter):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("FORK_LAUNCHED", raising=False)
    return library


@pytest.mark.parametrize(("asked", "states"), [(None, [{}, {}]), (1, [{"left": "behind"}])])
def test_a_process_for_each_core_starts_without_a_state_and_one_core_is_used_from_here(torch_xla, asked, states):
    storage.process.current["left"] = "behind"
    seen = []
    request = Request(lambda number: seen.append((number, dict(storage.process.current))), (5,), num_processes=asked)
    notebook.run_on_tpu(request)
    os.environ.pop("FORK_LAUNCHED", None)
    assert seen == [(5, state) for state in states] and torch_xla.calls == [(asked, "fork")]
