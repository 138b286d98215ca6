"""Runs that are killed at any moment, and disks that fail: after each time a whole checkpoint is there, and is what it claims.

The experiments are in `scripts/crash_run.py`. `make test-crash` makes 200 kills, and prints how many fell into which phase.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.conftest import SCRIPTS

if sys.platform != "linux":
    pytest.skip("forks, and watches /proc", allow_module_level=True)

SEED = os.environ.get("CRASH_SEED", "0")
LIMIT_S = 600


def experiments(folder: Path, **numbers: int) -> str:
    """Run the experiments; returns what they print. Nothing of them is left running, whatever happens."""
    options = [f"--{name}={number}" for name, number in numbers.items()]
    command = [sys.executable, str(SCRIPTS / "crash_run.py"), str(folder), f"--seed={SEED}", *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:  # its forks go with it
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output[-20_000:]
    return output


# Expensive: their tests run in one process.
SHARED = ("told",)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a short version of the experiments prints."""
    output = experiments(tmp_path_factory.mktemp("crash"), kills=20, failures=8, disks=2)
    print(output)
    return output


def test_killed_runs_leave_whole_checkpoints(told):
    assert re.search(r"^20 kills: ", told, re.M) and re.search(
        r"^ok \d+ checkpoints loaded, all whole$", told, re.M
    ), told


def test_disks_that_fail_leave_whole_checkpoints(told):
    assert re.search(r"^8 failures: ", told, re.M), told


def test_disks_that_are_full_leave_whole_checkpoints(told):
    line = next(line for line in told.splitlines() if line.startswith("full disks: "))
    if "skipped" in line:
        pytest.skip(line)
    assert line.endswith("the last checkpoint whole on each"), told


@pytest.mark.slow
def test_two_hundred_kills(tmp_path):
    output = experiments(tmp_path, kills=200, failures=60, disks=12)
    print(output)
    phases = re.search(r"^200 kills: (\d+) in save, (\d+) in publish, (\d+) in prune, (\d+) in load", output, re.M)
    assert phases and all(int(count) >= 20 for count in phases.groups()), output
