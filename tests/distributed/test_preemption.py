"""Preemption: a signal to one rank, to all processes or to the launcher makes the run save, leave with 75, and go on later."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from distributed.conftest import SCRIPTS, launch_command

SCRIPT = SCRIPTS / "preempted_run.py"
LIMIT_S = 240
QUICK = (
    "check_runs_go_on_exactly",
    "check_worker_processes_outlive_the_signal",
    "check_async_saves_are_waited_for",
    "check_a_loop_may_leave_by_itself",
    "check_loops_without_loaders_and_without_steps",
    "check_evaluations_are_not_cut_off",
    "check_uneven_ranks_do_not_wait_for_each_other",
    "check_several_optimizers_and_a_second_accelerator",
)


class Job:
    """A started run, whose output is read as it comes.

    Args:
        folder: where it saves.
        workers: worker processes of its loader.
        options: further options of the launcher.
    """

    def __init__(self, folder: Path, processes: int = 2, workers: int = 0, options: tuple[str, ...] = ()) -> None:
        command = [*launch_command(processes), *options, str(SCRIPT), str(folder), str(workers)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.errors: list[str] = []
        self.reader = threading.Thread(target=lambda: self.errors.extend(self.process.stderr))
        self.reader.start()
        self.lines: list[str] = []
        self.timer = threading.Timer(LIMIT_S, self.process.kill)
        self.timer.start()

    def reach(self, count: int) -> str:
        """Read until so many micro-batches are done, or until the run ends; returns the last line."""
        for line in self.process.stdout:
            self.lines.append(line)
            if sum(line.startswith("at ") for line in self.lines) >= count:
                break
        return self.lines[-1]

    def end(self) -> tuple[int, str, str]:
        """Wait; returns the exit status, what it wrote to standard output and to standard error."""
        self.lines.extend(self.process.stdout)
        status = self.process.wait()
        self.timer.cancel()
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return status, "".join(self.lines), "".join(self.errors)


def finish(folder: Path, **options) -> None:
    """Submit the run again; it goes on to its end and compares itself with one that was never interrupted."""
    job = Job(folder, **options)
    status, output, errors = job.end()
    assert status == 0 and "equal" in output, (status, output, errors)


def test_ranks_agree_save_and_go_on_exactly(launch):
    assert "ok all" in launch("check_preemption.py", *QUICK, environment={"PYTHONWARNINGS": "ignore"}).stdout


def test_signal_to_the_launcher(tmp_path):
    # With worker processes, because they hear it, too.
    job = Job(tmp_path, workers=2, options=("--max_restarts", "1"))
    job.reach(3)
    job.process.send_signal(signal.SIGTERM)
    status, output, errors = job.end()
    assert status == 75, (status, output, errors)
    assert "SIGTERM came" in errors and "it has saved itself" in errors
    assert "Traceback" not in errors, errors
    for rank in (0, 1):
        assert (tmp_path / f"told.{rank}").read_text() == "leaving\n", "no rank was stopped by another one's end"
    finish(tmp_path, workers=2)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_signal_to_every_process_of_a_job(tmp_path, processes):
    """As `scancel --full`, or a time limit: the launcher, the ranks and their workers get it."""
    job = Job(tmp_path, processes, workers=2)
    rank = int(job.reach(2).split()[-1])
    members = {job.process.pid, rank, *descendants(job.process.pid)}
    for member in members:
        os.kill(member, signal.SIGTERM)
    status, output, errors = job.end()
    assert status == 75, (status, output, errors)
    finish(tmp_path, processes=processes, workers=2)


@pytest.mark.slow
def test_many_signals_at_random(tmp_path, launch):
    assert "ok all" in launch("check_preemption.py", "check_random_interruptions").stdout
    draw = random.Random(1)
    for number in range(4):
        job = Job(tmp_path, workers=2)
        job.reach(draw.randint(1, 4))
        time.sleep(draw.random() / 20)
        job.process.send_signal(draw.choice([signal.SIGTERM, signal.SIGUSR1]))
        status, output, errors = job.end()
        assert status == 75, (number, status, output, errors)
    finish(tmp_path, workers=2)


@pytest.mark.slow
def test_a_run_that_does_not_listen_is_stopped(tmp_path):
    script = tmp_path / "deaf.py"
    script.write_text("import os, time\nprint('at', os.getpid(), flush=True)\ntime.sleep(300)\n")
    command = [*launch_command(2), "--max_restarts", "1", str(script)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    job.stdout.readline(), job.stdout.readline()
    job.send_signal(signal.SIGUSR1)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGUSR1 and "stopped by SIGUSR1" in errors, errors


def descendants(process: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(process).children(recursive=True)]


if sys.platform == "win32":
    pytest.skip("signals are those of POSIX", allow_module_level=True)
