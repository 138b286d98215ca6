"""What torch's launcher is told, and what its errors become."""

import logging
import multiprocessing
import signal
import threading

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch import elastic
from accelerate.launch.errors import LaunchError, RunError
from accelerate.launch.meeting import Elsewhere
from accelerate.launch.notebook import local, shipping
from accelerate.launch.notebook.failures import Endings, WorkerError
from accelerate.launch.notebook.local import MeetingError
from accelerate.launch.notebook.request import Request


def train():
    pass


@pytest.fixture
def start(monkeypatch):
    """Let torch's launcher do something else; run a request on it."""

    def run(answer, **arguments):
        def instead(config, function, args, environment, agent):
            run.config, run.agent, run.environment = config, agent, environment
            return answer(config)

        monkeypatch.setattr(elastic, "start", instead)
        local.run(Request(train, **arguments), shipping.fork(train, ()), {"A": "1"}, 2)
        return run

    return run


def raising(error):
    def answer(config):
        raise error

    return answer


def test_one_machine(start):
    done = start(lambda config: None, max_restarts=3, monitor_interval=0.5)
    config = done.config
    assert (config.min_nodes, config.nproc_per_node, config.max_restarts, config.monitor_interval) == (1, 2, 3, 0.5)
    assert (config.start_method, config.rdzv_endpoint, done.environment["A"]) == ("fork", "127.0.0.1:0", "1")
    assert config.run_id.startswith("accelerate-")
    assert config.log_line_prefix_template is None and not config.logs_specs._tee


def test_what_is_asked_for_arrives(start):
    config = start(
        lambda config: None,
        rdzv_backend="c10d",
        use_port=29501,
        rdzv_id="mine",
        rdzv_conf={"timeout": 7},
        log_line_prefix_template="[${rank}] ",
    ).config
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("c10d", "127.0.0.1:29501", "mine")
    assert config.rdzv_configs["timeout"] == 7
    assert config.log_line_prefix_template == "[${rank}] " and int(config.logs_specs._tee) == 3


@pytest.mark.parametrize(
    ("method", "shown", "prefix"), [("fork", False, None), ("spawn", True, None), ("spawn", False, "[rank ${rank}] ")]
)
def test_fresh_processes_of_a_notebook_are_read_from_files(start, monkeypatch, method, shown, prefix):
    monkeypatch.setattr(local.output, "descriptors_are_shown", lambda: shown)
    monkeypatch.setattr(shipping, "fork", lambda function, args: shipping.Shipment(method, function, args))
    config = start(lambda config: None).config
    assert config.log_line_prefix_template == prefix and bool(config.logs_specs._tee) is (prefix is not None)


@pytest.mark.parametrize(
    ("backend", "node_rank", "machine"), [("static", 0, 0), ("static", 1, 1), ("c10d", 0, None), ("c10d", 1, 1)]
)
def test_machines(start, monkeypatch, backend, node_rank, machine):
    made = []
    monkeypatch.setattr(
        "accelerate.launch.elastic_machines.make_config", lambda meeting, *a, **k: made.append(meeting)
    )
    monkeypatch.setattr("accelerate.launch.network.is_this_machine", lambda host: False)
    start(
        lambda config: None,
        num_nodes=2,
        node_rank=node_rank,
        rdzv_backend=backend,
        use_port=29501,
        rdzv_conf={"timeout": 9},
    )
    (meeting,) = made
    assert (meeting.host, meeting.port, meeting.machines, meeting.machine) == ("127.0.0.1", 29501, 2, machine)
    assert (meeting.processes, meeting.join_timeout) == (2, 9.0)


def test_other_backends_are_torchs(start):
    config = start(
        lambda config: None,
        num_nodes=2,
        rdzv_backend="etcd-v2",
        rdzv_endpoint="127.0.0.1:1",
        rdzv_id="mine",
        rdzv_conf={"a": 1},
    ).config
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("etcd-v2", "127.0.0.1:1", "mine")
    assert (config.min_nodes, config.max_nodes, config.rdzv_configs["a"]) == (2, 2, 1)


@pytest.mark.parametrize(
    ("conf", "seconds"), [(None, 600), ({"timeout": "5"}, 5), ({"join_timeout": 7, "timeout": 5}, 7)]
)
def test_patience(conf, seconds):
    assert local.patience_s(Request(train, rdzv_conf=conf)) == seconds


def test_a_taken_port(start):
    error = dist.DistNetworkError("The server socket has failed to listen. name: EADDRINUSE")
    with pytest.raises(MeetingError, match="use_port asks for port 29501, which another program listens at"):
        start(raising(error), use_port=29501)
    with pytest.raises(MeetingError, match="rdzv_endpoint asks for port 29502"):
        start(raising(error), rdzv_endpoint="127.0.0.1:29502")
    with pytest.raises(MeetingError, match="could not meet at 127.0.0.1, port any: The server"):
        start(raising(error))


def test_errors_of_a_meeting_speak_of_arguments(start):
    machines = {"num_nodes": 2, "use_port": 29501}
    with pytest.raises(
        MeetingError, match=r"master_addr and use_port; rdzv_conf=\{'join_timeout': SECONDS\} waits longer"
    ):
        start(
            raising(
                RunError("--main_process_ip and --main_process_port; --rdzv_conf join_timeout=SECONDS waits longer")
            ),
            **machines,
        )
    with pytest.raises(LaunchError, match="node_rank is 1 twice"):
        start(raising(LaunchError("--machine_rank is 1 twice")), **machines)
    with pytest.raises(WorkerError, match="machine 1: rank 2 ended"):
        start(raising(Elsewhere("machine 1: rank 2 ended")), **machines)
    with pytest.raises(MeetingError, match="could not meet at 127.0.0.1:29501: no etcd"):
        start(raising(dist.DistStoreError("no etcd")), **machines)


def failed(exitcode):
    return ChildFailedError("train", {0: ProcessFailure(0, 7, exitcode, "nowhere")})


def test_failures(start):
    with pytest.raises(
        WorkerError, match="Rank 0 failed in train:\n\nThe process 7 ended with exit status 3"
    ) as caught:
        start(raising(failed(3)))
    assert caught.value.exitcode == 3
    with pytest.raises(WorkerError, match="Processes of other machines"):
        start(raising(failed(3)), num_nodes=2)


def test_a_run_that_has_saved_itself(start):
    with pytest.raises(SystemExit) as caught:
        start(raising(failed(PREEMPTED)))
    assert caught.value.code == PREEMPTED


def test_signals(start):
    with pytest.raises(KeyboardInterrupt):
        start(raising(SignalException("x", signal.SIGINT)))
    with pytest.raises(SignalException):
        start(raising(SignalException("x", signal.SIGTERM)))


def test_handlers_and_loggers_are_as_before(start):
    before = signal.getsignal(signal.SIGINT)
    levels = [logging.getLogger(name).level for name in local._LOGGERS]
    start(lambda config: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert signal.getsignal(signal.SIGINT) is before
    assert [logging.getLogger(name).level for name in local._LOGGERS] == levels


def test_one_launch_at_a_time(start):
    seen = []

    def second():
        try:
            local.run(Request(train), shipping.fork(train, ()), {}, 1)
        except RuntimeError as error:
            seen.append(str(error))

    def answer(config):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    start(answer)
    assert "Another thread of this process is running a launcher" in seen[0]
    start(lambda config: None)


def test_whoever_is_left_is_killed():
    context = multiprocessing.get_context("fork")
    endings = Endings()
    with pytest.raises(KeyError), local._nobody_left(endings):
        process = context.Process(target=signal.pause)
        process.start()
        raise KeyError
    assert process.exitcode == -signal.SIGKILL
