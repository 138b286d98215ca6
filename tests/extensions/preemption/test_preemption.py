"""Preemption: a signal to one rank, to all processes or to the launcher makes the run save, leave with 75, and continue later."""

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from distributed.conftest import LIMIT_S, SCRIPTS, begun, launch_command

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")


class Job:
    """A started run, whose output is read as it comes; it waits for a signal after `hold` micro-batches (0 for never)."""

    def __init__(self, folder: Path, processes: int = 2, hold: int = 0, options: tuple[str, ...] = ()):
        command = [*launch_command(processes), *options, str(SCRIPTS / "preempted_run.py"), str(folder), str(hold)]
        self.process = begun(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
        self.timer = threading.Timer(LIMIT_S, self.process.kill)
        self.timer.start()
        while hold and (line := self.process.stdout.readline()) and line != "holding\n":
            pass

    def end(self, status: int) -> str:
        """Wait, and require an exit status; returns what it wrote."""
        output, errors = self.process.communicate()
        self.timer.cancel(), self.timer.join()
        assert self.process.returncode == status, (self.process.returncode, output, errors)
        return output + errors


def finish(folder: Path, **options: int) -> None:
    """Submit the run again; it continues to its end and compares itself with one that was never interrupted."""
    assert "equal" in Job(folder, **options).end(status=0)


def test_ranks_agree_save_and_go_on_exactly(launch):
    launch("several.py", "check_preemption.py")


@pytest.mark.slow
def test_signal_to_the_launcher(tmp_path):
    # With worker processes, because they may hear it, too.
    job = Job(tmp_path, hold=3, options=("--max_restarts", "1"))
    job.process.send_signal(signal.SIGTERM)
    output = job.end(status=75)
    assert "SIGTERM came" in output and "it has saved itself" in output and "Traceback" not in output, output
    # Neither was stopped because the other one had ended.
    assert (tmp_path / "left.0").exists() and (tmp_path / "left.1").exists()
    finish(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_signal_to_every_process_of_a_job(tmp_path, processes):
    job = Job(tmp_path, processes, hold=2)
    launcher = psutil.Process(job.process.pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        process.terminate()
    job.end(status=75)
    finish(tmp_path, processes=processes)
