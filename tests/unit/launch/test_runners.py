"""Starting and ending of processes; real launches are in tests/distributed."""

import os
import signal
import subprocess
import sys

import pytest

from accelerate.launch import runners


class Failure:
    pid = 7

    def __init__(self, exitcode):
        self.exitcode = exitcode


class ChildError(Exception):
    def __init__(self, exitcode):
        self.exitcode = exitcode

    def get_first_failure(self):
        return 1, Failure(self.exitcode)


class SignalError(Exception):
    sigval = 15


@pytest.mark.parametrize(
    ("error", "status", "fragment"),
    [
        (ChildError(3), 3, "rank 1 (pid 7) failed with exit status 3"),
        (ChildError(-9), 137, "was killed by SIGKILL"),
        (ChildError(-200), 328, "signal 200"),
        (SignalError(), 143, "stopped by SIGTERM"),
        (subprocess.CalledProcessError(5, ["x"]), 5, "exit status 5"),
        (subprocess.CalledProcessError(-15, ["x"]), 143, "SIGTERM"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ChildError(75), 75, "it has saved itself"),
        (subprocess.CalledProcessError(75, ["x"]), 75, "it has saved itself"),
    ],
)
def test_failures_become_a_status_and_a_line(error, status, fragment):
    assert runners.failure_of(error)[0] == status
    assert fragment in runners.failure_of(error)[1]


def test_foreign_errors_stay_errors():
    with pytest.raises(ZeroDivisionError):
        runners.failure_of(ZeroDivisionError())


def test_child_gets_its_environment(tmp_path):
    program = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ['MARK'])"
    runners.run_child([sys.executable, "-c", program, str(tmp_path / "out")], {**os.environ, "MARK": "x"})
    assert (tmp_path / "out").read_text() == "x"


def test_child_failure_is_raised():
    with pytest.raises(subprocess.CalledProcessError) as caught:
        runners.run_child([sys.executable, "-c", "raise SystemExit(4)"], os.environ)
    assert caught.value.returncode == 4


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_reach_the_child(number):
    program = "import os, signal; os.kill(os.getppid(), int(os.environ['NUMBER'])); signal.pause()"
    before = signal.getsignal(number)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        runners.run_child([sys.executable, "-c", program], {**os.environ, "NUMBER": str(int(number))})
    assert caught.value.returncode == -number and signal.getsignal(number) == before


def test_one_process_replaces_the_launcher_only_where_it_may(plan, monkeypatch):
    calls = []
    monkeypatch.setattr(runners, "become", lambda command, environment: calls.append("become"))
    monkeypatch.setattr(runners, "run_child", lambda command, environment: calls.append("child"))
    monkeypatch.setattr(runners, "run_elastic", lambda plan, environment: calls.append("elastic"))
    runners.run(plan("--cpu"), replace=True)
    runners.run(plan("--cpu"))
    runners.run(plan("--cpu --num_processes 2"), replace=True)
    assert calls == ["become", "child", "elastic"]


def test_notes_are_printed_unless_quiet(plan, monkeypatch, capsys):
    monkeypatch.setattr(runners, "run_elastic", lambda plan, environment: None)
    runners.run(plan("--cpu --num_processes 2"))
    assert capsys.readouterr().err.startswith("accelerate launch: OMP_NUM_THREADS=4 ")
    runners.run(plan("--quiet --cpu --num_processes 2"))
    assert capsys.readouterr().err == ""
