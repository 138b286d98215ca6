"""Torch's elastic launcher with our agent: real processes, small ones that do not import torch."""

import json
import os
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import psutil
import pytest
import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accelerate.launch import elastic
from accelerate.launch.errors import LaunchError, endings_of
from accelerate.launch.plan import Rendezvous
from accelerate.runtime import failure
from accelerate.runtime.failure import PREEMPTED
from cases import cases

pytestmark = pytest.mark.cold

posix = pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
PRELUDE = f"""
import json, os, signal, sys, time
rank, attempt, launcher = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.getppid()
def leave(**record):
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({{"message": "x", {failure.OURS!r}: {{"rank": rank, "traceback": "Error", **record}}}}, file)
def both_up():
    open(f"up{{rank}}", "w").close()
    while not (os.path.exists("up0") and os.path.exists("up1")):
        time.sleep(0.01)
"""
LOST = "RuntimeError: Connection closed by peer"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a program in two processes; it returns the reporter and the exception."""
    monkeypatch.chdir(tmp_path)
    # As in a background shell, where SIGINT is ignored, the launcher handles it all the same.
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr(elastic, "_hangups_are_ignored", False)

    def run(program, started=None, **rest):
        reporter = Mock()
        reporter.started.side_effect = started
        asked = (sys.executable, ("-c", PRELUDE + program), os.environ, 2, Rendezvous(), str(tmp_path / "logs"))
        try:
            elastic.start(*asked, reporter=reporter, monitor_interval=0.02, **rest)
        except (ChildFailedError, SignalException) as error:
            return reporter, error
        return reporter, None

    yield run
    signal.signal(signal.SIGINT, former)


@cases(
    "options, expected",
    ("", {0: 0, 1: 0}),
    ("--tee 0:1,1:3", {0: 1, 1: 3}),
    ("--log_dir out", {0: 3, 1: 3}),
    ("--monitor_interval inf", "--monitor_interval is inf"),
    ("--tee 9", "--tee is '9'. Write 0"),
)
def test_streams(found_or_refused, plan, options, expected):
    found_or_refused(expected, elastic.streams, plan(f"--cpu --num_processes 2 {options}"))


def test_directories(tmp_path):
    given = str(tmp_path / "a" / "b")
    with elastic.directory(given) as directory:
        assert directory == given and os.listdir(given) == []
    with elastic.directory(None) as directory:
        assert os.path.isdir(directory)
    assert os.path.isdir(given) and not os.path.exists(directory)
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="--log_dir is .*file"), elastic.directory(str(tmp_path / "file")):
        pass


def test_each_restart_has_a_store_of_its_own():
    """Torch leaves the addresses of dead peers in a store."""
    rendezvous = elastic.StoreRendezvous("127.0.0.1", 0, 0, 1, "run", 30)
    first, second = rendezvous.next_rendezvous(), rendezvous.next_rendezvous()
    first.store.set("key", "value")
    assert first.store.get("key") == b"value" and not second.store.check(["key"])
    ports = [info.bootstrap_store_info.master_port for info in (first, second)]
    assert all(ports) and ports[0] != ports[1] and (first.rank, first.world_size) == (0, 1)


def _variables_of_a_function(path):
    with open(path, "w") as file:
        json.dump(dict(os.environ), file)


def test_variables_are_those_of_the_run_and_come_back(run, tmp_path, monkeypatch):
    monkeypatch.setenv("BEFORE", "1")
    assert run("json.dump(dict(os.environ), open(f'program{rank}', 'w'))")[1] is None
    asked = (_variables_of_a_function, (str(tmp_path / "function"),), {"DURING": "2"}, 1, Rendezvous())
    elastic.start(*asked, str(tmp_path / "logs"), start_method="fork")
    program, function = [json.loads((tmp_path / name).read_text()) for name in ("program0", "function")]
    assert program[failure.LAUNCHER] == str(os.getpid()) and program["BEFORE"] == "1"
    assert function["DURING"] == "2" and not {failure.LAUNCHER, "BEFORE"}.intersection(function)
    assert os.environ["BEFORE"] == "1" and not {"DURING", failure.LAUNCHER}.intersection(os.environ)


def test_a_launcher_of_functions_does_not_look_for_gpus(tmp_path, monkeypatch):
    """Torch's look starts the driver, and processes that are forked afterwards cannot use it."""
    looks = Mock(return_value=False)
    monkeypatch.setattr(torch.cuda, "is_available", looks)
    asked = (_variables_of_a_function, (str(tmp_path / "function"),), os.environ, 1, Rendezvous())
    elastic.start(*asked, str(tmp_path / "logs"), start_method="fork")
    assert not looks.called


def test_how_long_processes_have_to_end_can_be_set(run, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    reporter, error = run("time.sleep(60)", lambda *_: signal.raise_signal(signal.SIGINT))
    (number, grace), _ = reporter.stopping.call_args
    assert number == error.sigval == signal.SIGINT and grace in (7, 30)  # 30: a torch without that setting


def test_a_failure_that_follows_is_not_the_first(run):
    """The rank that closed the connection ends some time after the rank that lost it."""
    _, error = run(f"both_up()\nif rank: leave(traceback={LOST!r}); sys.exit(1)\ntime.sleep(0.5); sys.exit(3)")
    assert [(ending.rank, ending.status) for ending in endings_of(error.failures)] == [(0, 3), (1, 1)]


def test_a_rank_that_has_failed_and_does_not_end_is_shown(run, monkeypatch):
    monkeypatch.setattr(elastic, "_LINGERING_S", 0.1)
    reporter, error = run("leave() if rank else None; both_up(); time.sleep(1)")
    assert error is None and {call.args[0] for call in reporter.lingers.call_args_list} == {1}


@pytest.mark.parametrize(("patience", "last"), [(60.0, PREEMPTED), (0.1, -signal.SIGTERM)])
def test_other_ranks_may_save_the_run_and_it_is_not_restarted(run, monkeypatch, patience, last):
    monkeypatch.setattr(elastic, "ENDING_S", patience)
    reporter, error = run(f"both_up(); time.sleep(rank); sys.exit({PREEMPTED})", max_restarts=2)
    # Up to 2.9 torch omits those that it has stopped.
    assert {0: PREEMPTED} | {1: last} == {1: last} | {rank: one.exitcode for rank, one in error.failures.items()}
    assert reporter.started.call_count == 1


SAVES = """
came = []
signal.signal(signal.SIGTERM, lambda *_: came.append(1))
both_up()
if rank == 0:
    for _ in range(2): os.kill(launcher, signal.SIGTERM); time.sleep(0.1)
while not came: time.sleep(0.01)
time.sleep(0.5)
sys.exit(len(came) - 1)
"""


@posix
def test_a_signal_is_forwarded_once(run):
    """A scheduler may send it to all processes of a job more than once."""
    assert run(SAVES)[1] is None


@posix
def test_a_signal_that_comes_again_later_ends_the_run(run, monkeypatch):
    monkeypatch.setattr(elastic, "_REPEAT_S", 0.05)
    again = "signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(0.2); rank or os.kill(launcher, signal.SIGTERM)"
    program = SAVES.replace("range(2)", "range(1)").replace("time.sleep(0.5)", f"{again}; time.sleep(60)")
    assert run(program)[1].sigval == signal.SIGTERM


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_processes_start_ends_the_run_and_the_handlers_come_back(run, number):
    """The processes are known to the launcher before it acts."""
    former = {number: signal.getsignal(number) for number in (*elastic.FORWARDED, *elastic.STOPPING)}
    started = time.monotonic()
    reporter, error = run("time.sleep(60)", lambda *_: signal.raise_signal(number))
    assert error.sigval == number and time.monotonic() - started < 25
    assert reporter.stopping.called is (number in elastic.STOPPING)
    assert {number: signal.getsignal(number) for number in former} == former


def _ends_itself():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@posix
def test_a_forked_process_has_no_processes_to_forward_signals_to(tmp_path):
    with pytest.raises(ChildFailedError) as caught:
        elastic.start(_ends_itself, (), os.environ, 1, Rendezvous(), str(tmp_path), start_method="fork")
    # Up to 2.9 torch leaves its own handler in the child, which raises.
    assert caught.value.failures[0].exitcode in (-signal.SIGTERM, 1)


# a separate program: of a fork of this process, which has threads, a lock of theirs may never be released.
_EIGHT = """
import os, sys
from accelerate.launch import elastic
from accelerate.launch.plan import Rendezvous
program = ("-c", "import time; time.sleep(300)", sys.argv[2])
elastic.start(sys.executable, program, os.environ, 8, Rendezvous(), sys.argv[1])
"""


def _marked(mark):
    return [one for one in psutil.process_iter(["cmdline", "status"]) if mark in (one.info["cmdline"] or ())]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end a process with its parent")
@pytest.mark.parametrize("begun", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 8))])
def test_a_launcher_that_is_killed_while_it_starts_ranks_leaves_none(tmp_path, begun):
    mark = f"rank-of-{os.getpid()}-{begun}"
    launcher = subprocess.Popen([sys.executable, "-c", _EIGHT, str(tmp_path), mark])
    children = psutil.Process(launcher.pid).children
    while len(children()) < begun + 1:  # the first one is the guard
        assert launcher.poll() is None
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 10
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert not left
