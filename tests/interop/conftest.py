"""How downstream libraries are run: their real code on tiny random models, offline."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
PEER = ROOT / ".venv-peer-interop" / "bin" / "python"
LIMIT_S = 400


def figures(python: str, script: str, folder: Path, processes: int, ours: bool) -> dict[str, Any]:
    """Run a script and return the figures it prints."""
    folder.mkdir(parents=True, exist_ok=True)
    program = [str(SCRIPTS / script), str(folder)]
    if processes == 1:
        command = [python, *program]
    elif ours:
        options = ["--cpu", "--num_processes", str(processes)]
        command = [python, "-m", "accelerate.commands.accelerate_cli", "launch", *options, *program]
    else:
        # The peer's launcher starts one process on the CPU; torchrun starts as many as it is told.
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), *program]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    assert lines, done.stdout[-4000:] + done.stderr[-4000:]
    return {**json.loads(lines[-1]), "stderr": done.stderr}


@pytest.fixture
def run_ours(tmp_path: Path) -> Callable[[str, int], dict[str, Any]]:
    """Run a script on this package."""
    return lambda script, processes: figures(sys.executable, script, tmp_path / "ours", processes, ours=True)


@pytest.fixture
def run_peer(tmp_path: Path) -> Callable[[str, int], dict[str, Any]]:
    """Run a script on the peer's wheel, in the environment that `make bench-peer` makes."""
    if not PEER.exists():
        pytest.skip("the peer's environment is not there; `make bench-peer` makes it")
    return lambda script, processes: figures(str(PEER), script, tmp_path / "peer", processes, ours=False)
