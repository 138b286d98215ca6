"""How distributed tests run: real processes under our own ``accelerate launch``, on GPUs where there are enough."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 240


def launch_command(processes: int, *, cpu: bool | None = None) -> list[str]:
    """Return the start of a launch command; on the CPU unless there is a GPU for every process."""
    if cpu is None:
        cpu = torch.cuda.device_count() < processes
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", str(processes)]
    return [*command, "--cpu"] if cpu else command


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run a script of ``scripts/`` under the launcher, and require that it succeeds (or fails, where a test says so)."""

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
        path = os.pathsep.join(
            filter(None, [str(SCRIPTS.parents[1]), os.environ.get("PYTHONPATH")])
        )  # tests/: what tests share
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(environment or {})}
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=limit_s)
        report = f"{' '.join(command)}\nexit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        assert (done.returncode == 0) is succeeds, report
        return done

    return run


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[[str, dict[str, str]], subprocess.CompletedProcess]:
    """Run a line of Python in a fresh process with extra environment variables."""

    def run(code: str, variables: dict[str, str]) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    return run
