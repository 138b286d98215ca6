"""How distributed tests run: real processes under our own ``accelerate launch``, on GPUs where there are enough."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from accelerate.utils.other import get_free_port

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 240
LAUNCH_ON_CPU = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu"]
# What a launcher, a scheduler or the tests themselves put into the environment.
OUTER = ("ACCELERATE_", "OMP_", "SLURM", "OMPI_", "PMI", "PBS_", "LSB_", "PYTEST_")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launch_command(processes: int, *, cpu: bool | None = None) -> list[str]:
    """Return the start of a launch command; on the CPU unless there is a GPU for every process."""
    if cpu is None:
        cpu = torch.cuda.device_count() < processes
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", str(processes)]
    return [*command, "--cpu"] if cpu else command


def plain_environment(home: Path, **more: str) -> dict[str, str]:
    """Return the variables of a shell that neither a launcher nor a scheduler has started, and some more."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OUTER) and name not in RANKS}
    return {**kept, "HF_HOME": str(home), **more}


def lines_without_gloo(text: str) -> list[str]:
    """Return the lines of an output without what gloo of torch 2.9 prints, in pieces that those of two ranks may part."""
    pieces = r"\[Gloo\] Rank \d+|is connected to \d+ peer ranks\.|Expected number of connected peer ranks is : \d+"
    return [line for line in re.sub(pieces, "", text).splitlines() if line.strip()]


def until(question: Callable[[], object], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, its status read by its parent or not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def gone(processes: Iterable[psutil.Process]) -> None:
    processes = list(processes)
    try:
        until(lambda: all(map(has_ended, processes)), "all processes are gone")
    finally:
        for process in processes:
            if not has_ended(process):
                process.kill()


def stop(programs: Iterable[subprocess.Popen]) -> None:
    """Ask programs to end, and kill those that do not."""
    for program in programs:
        program.terminate()
        try:
            program.wait(timeout=40)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()


def begun(command: Iterable[str], **options: Any) -> subprocess.Popen:
    return subprocess.Popen(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options})


def done(command: Iterable[str], **options: Any) -> subprocess.CompletedProcess:
    return subprocess.run(command, **{"capture_output": True, "text": True, "timeout": LIMIT_S, **options})


def started_by_hand(
    script: str, *words: str, size: int, inside: Sequence[str] = (), cwd: Path, **variables: str
) -> list[subprocess.Popen]:
    """Start the ranks of a script without a launcher: one that dies does not end the others, and rank 0 holds the store."""
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(get_free_port()), "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    command = [*inside, sys.executable, str(SCRIPTS / script), *words]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    environments = [{**os.environ, **shared, **own, **variables} for own in ranks]
    return [begun(command, env=each, cwd=cwd, stderr=subprocess.STDOUT) for each in environments]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let launchers be interruptible where the suite itself ignores SIGINT, as in a background shell."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run a script of ``scripts/`` under the launcher, and require that it succeeds (or fails, where a test expects it)."""

    def run(
        script: str,
        *arguments: str,
        processes: int = 2,
        cpu: bool | None = None,
        succeeds: bool = True,
        environment: dict[str, str] | None = None,
        limit_s: float = LIMIT_S,
    ) -> subprocess.CompletedProcess:
        command = [*launch_command(processes, cpu=cpu), str(SCRIPTS / script), *arguments]
        paths = [str(SCRIPTS.parents[1]), os.environ.get("PYTHONPATH")]  # tests/: what tests share
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        ended = done(command, env={**variables, **(environment or {})}, cwd=tmp_path, timeout=limit_s)
        report = f"{' '.join(command)}\nexit code {ended.returncode}\n{ended.stdout[-6000:]}\n{ended.stderr[-6000:]}"
        assert (ended.returncode == 0) is succeeds, report
        return ended

    return run
