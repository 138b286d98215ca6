"""Signals to the launcher of several processes: they reach the processes, and nothing stays behind."""

import os
import signal
import sys
import threading

import psutil
import pytest

import warm
from distributed.conftest import LAUNCH_ON_CPU, LIMIT_S, begun, gone

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX"),
    pytest.mark.usefixtures("interruptible"),
]

# Each rank starts a separate process, as loaders and compilers do, and says when all are up.
RANK = """
import os, signal, subprocess, sys, time
for name in {ignored!r}:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(f"up {os.getpid()} {child.pid}\\n", end="", flush=True)  # in one piece
"""
WAITS = RANK + "time.sleep(300)"
WITH_STATE = "from accelerate import PartialState\nstate = PartialState()" + WAITS


class Job:
    """A launch whose ranks are up."""

    def __init__(self, folder, text=WAITS, ignored=(), shell=(), options=()):
        script = folder / "script.py"
        script.write_text(text.replace("{ignored!r}", repr(list(ignored))))
        # The ranks are real children of the launcher, whatever has started that.
        command = [*shell, *LAUNCH_ON_CPU, "--num_processes", "2", *options, "--no_python", warm.REAL, str(script)]
        self.process = begun(command, start_new_session=True)
        self.timer = threading.Timer(LIMIT_S, self.process.kill)
        self.timer.start()
        self.started = []
        while len(self.started) < 4 and (line := self.process.stdout.readline()):
            if line.startswith("up "):
                self.started += [psutil.Process(int(word)) for word in line.split()[1:]]
        self.launcher = self.started[0].parent() if self.started else None
        self.all = self.launcher.children(recursive=True) if self.launcher else []

    def end(self):
        """Wait, and return status and errors; everything that it had started must be gone."""
        _, errors = self.process.communicate()
        self.timer.cancel(), self.timer.join()
        gone(self.all)
        return self.process.returncode, errors


@pytest.mark.parametrize(
    ("number", "text"),
    [(signal.SIGINT, WITH_STATE), (signal.SIGTERM, WAITS), (signal.SIGHUP, WAITS)],
    ids=["INT", "TERM", "HUP"],
)
def test_a_signal_leaves_no_orphans(tmp_path, number, text):
    job = Job(tmp_path, text)
    job.process.send_signal(number)
    status, errors = job.end()
    assert status == 128 + number, errors
    assert f"stopped by {number.name}" in errors and "death signal" not in errors
    assert 'script.py", line' not in errors  # no traceback of each rank


def test_a_second_interrupt_kills(tmp_path):
    job = Job(tmp_path, ignored=["SIGINT", "SIGTERM"])
    job.process.send_signal(signal.SIGINT)
    while "Ctrl-C again kills them" not in job.process.stderr.readline():
        pass
    assert all(process.is_running() for process in job.started)
    job.process.send_signal(signal.SIGINT)
    status, errors = job.end()
    assert status == 130, errors


def test_a_killed_launcher_leaves_no_orphans(tmp_path):
    job = Job(tmp_path)
    job.launcher.kill()
    assert job.end()[0] == -signal.SIGKILL


def test_what_a_failed_rank_has_started_ends_too(tmp_path):
    go = tmp_path / "go"
    os.mkfifo(go)
    fails = f"if os.environ['RANK'] == '1':\n    open({str(go)!r}).close()\n    raise ValueError('x')\ntime.sleep(300)"
    job = Job(tmp_path, RANK + fails)
    go.write_text("")  # once the job knows all processes, since those that have ended cannot be looked up
    status, errors = job.end()
    assert status == 1 and errors.count("ValueError: x") == 1


def test_nohup_outlives_the_terminal(tmp_path):
    """The shell's `nohup` starts a program that ignores SIGHUP; so do the launcher and its processes."""
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    job = Job(tmp_path, shell=[sys.executable, "-c", ignoring])
    for process in (job.launcher, *job.started):
        process.send_signal(signal.SIGHUP)
    job.process.send_signal(signal.SIGTERM)  # handled after the other, if that had an effect
    status, errors = job.end()
    assert status == 143 and "SIGHUP" not in errors, errors


def test_the_guard_and_files_go_with_a_run_that_ends_well(tmp_path):
    job = Job(tmp_path, "print('done')", options=["--log_dir", str(tmp_path / "logs")])
    assert job.end()[0] == 0
    assert not list((tmp_path / "logs").rglob("fault.log"))
