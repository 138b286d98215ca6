"""Real processes under the mpirun programs of this machine: they meet, end together, and keep their status."""

import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from distributed.conftest import LAUNCH_ON_CPU as LAUNCH
from distributed.conftest import begun, done, gone, plain_environment, until

pytestmark = pytest.mark.cold

MAKERS = ("openmpi", "mpich")
MEET = """
import os
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
total = accelerator.reduce(torch.ones(1)).item()
where = accelerator.process_index, accelerator.local_process_index, accelerator.num_processes
words = "at", *where, int(total), os.environ["OMP_NUM_THREADS"], accelerator.mixed_precision
print(" ".join(map(str, words)) + "\\n", end="", flush=True)
accelerator.wait_for_everyone()
accelerator.end_training()
"""
WAIT = """
import os, pathlib, time
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
pathlib.Path("pid" + rank + ".part").write_text(str(os.getpid()))
os.rename("pid" + rank + ".part", "pid" + rank)
time.sleep(300)
"""


@pytest.fixture(params=MAKERS)
def environment(request, tmp_path):
    """The variables of a machine whose mpirun is the one of this maker."""
    maker = request.param
    program = shutil.which(f"mpirun.{maker}") or (shutil.which("mpirun") if _is(maker) else None)
    if program is None:
        pytest.skip(f"there is no mpirun of {maker} here")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "mpirun").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    (folder / "mpirun").chmod(0o755)
    # Tests run as root in containers.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return plain_environment(tmp_path / "home", PATH=f"{folder}{os.pathsep}{os.environ['PATH']}", **allowed)


def _is(maker):
    program = shutil.which("mpirun")
    if program is None:
        return False
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout.lower()
    return ("open mpi" in said or "openrte" in said) == (maker == "openmpi")


@pytest.fixture
def command(tmp_path):
    """Return the command that launches a program text on the slots of a host file."""

    def make(text, slots, options=()):
        (tmp_path / "script.py").write_text(text)
        (tmp_path / "hosts").write_text(f"# this machine\nlocalhost slots={slots}\n")
        more = ["--quiet", "--num_processes", str(slots), "--mpirun_hostfile", "hosts", *options]
        return [*LAUNCH, *more, "script.py"]

    return make


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_meet(command, environment, tmp_path, processes):
    options = ("--num_cpu_threads_per_process", "1", "--mixed_precision", "bf16")
    ended = done(command(MEET, processes, options=options), env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    said = sorted(line for line in ended.stdout.splitlines() if line.startswith("at "))
    assert said == [f"at {rank} {rank} {processes} {processes} 1 bf16" for rank in range(processes)]


def test_two_jobs_side_by_side(environment, tmp_path):
    """Here mpirun starts the launches, or the script itself; a shell in between hides neither."""
    (tmp_path / "script.py").write_text(MEET)
    (tmp_path / "wrapper.sh").write_text('"$@"\n:\n')
    launch = [*LAUNCH[1:], "--num_cpu_threads_per_process", "1"]
    start = ["mpirun", "-n", "2", "sh", "wrapper.sh", sys.executable]
    place = {"stderr": subprocess.STDOUT, "cwd": tmp_path, "env": {**environment, "OMP_NUM_THREADS": "1"}}
    jobs = [begun([*start, *words, "script.py"], **place) for words in (launch, [])]
    for said in [job.communicate(timeout=180)[0] for job in jobs]:
        assert sorted(line for line in said.splitlines() if line) == [f"at {rank} {rank} 2 2 1 no" for rank in (0, 1)]


def test_status_is_kept_and_the_traceback_is_seen(command, environment, tmp_path):
    place = {"env": environment, "cwd": tmp_path}
    assert done(command("raise SystemExit(3)", 2), **place).returncode == 3
    ended = done(command("raise ValueError('what went wrong')", 2), **place)
    assert ended.returncode == 1 and "ValueError: what went wrong" in ended.stdout + ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_signals_leave_no_orphans(command, environment, tmp_path, number):
    job = begun(command(WAIT, 2), cwd=tmp_path, env=environment, start_new_session=True)
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    until(lambda: job.poll() is not None or all(file.exists() for file in files), "both processes are up")
    assert job.poll() is None, job.communicate()
    processes = [psutil.Process(int(file.read_text())) for file in files]
    # As a terminal does with Ctrl-C; a scheduler's SIGTERM goes to the launcher.
    os.killpg(job.pid, number) if number == signal.SIGINT else os.kill(job.pid, number)
    job.communicate(timeout=60)
    assert job.returncode != 0
    gone(processes)
