"""Runs that are killed at any moment, and disks that fail: after each time a whole checkpoint is there, and is what it claims.

The experiments are in `scripts/crash_run.py`. `make test-crash` makes 200 kills, and prints how many fell into which phase.
"""

import os
import random
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from distributed.conftest import SCRIPTS, begun, done, launch_command

pytestmark = pytest.mark.cold

if sys.platform != "linux":
    pytest.skip("forks, and watches /proc", allow_module_level=True)

SEED = os.environ.get("CRASH_SEED", "0")
LIMIT_S = 600


def experiments(folder: Path, **numbers: int) -> str:
    """Run the experiments; returns what they print. Forks die with their parent, so nothing of them is left running."""
    options = [f"--{name}={number}" for name, number in {**numbers, "seed": SEED}.items()]
    command = [sys.executable, str(SCRIPTS / "crash_run.py"), str(folder), *options]
    ended = done(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True, timeout=LIMIT_S)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-20_000:]
    print(ended.stdout)
    return ended.stdout


def test_killed_runs_and_broken_disks_leave_whole_checkpoints(tmp_path):
    output = experiments(tmp_path, kills=6, failures=4, disks=1)
    for line in ("6 kills: ", "4 failures: ", "full disks: (1, |skipped)", r"ok \d+ checkpoints loaded, all whole$"):
        assert re.search(f"^{line}", output, re.M), output


@pytest.mark.slow
def test_two_hundred_kills(tmp_path):
    output = experiments(tmp_path, kills=200, failures=60, disks=12)
    phases = re.search(r"^200 kills: (\d+) in save, (\d+) in publish, (\d+) in prune, (\d+) in load", output, re.M)
    assert phases and all(int(count) >= 20 for count in phases.groups()), output


def killed_while_it_saves(folder: Path, least: int, after_s: float) -> tuple[int, int]:
    """Run until a moment after a save, kill all of it; return the steps that it loaded, and that it saved last."""
    command = [*launch_command(2, cpu=True), str(SCRIPTS / "shards_run.py"), str(folder), str(least)]
    process = begun(command, stderr=None, start_new_session=True)
    seen: list[str] = []
    timer = threading.Timer(after_s, os.killpg, (process.pid, signal.SIGKILL))
    limit = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        for line in process.stdout:
            seen += re.findall(r"(?:loaded|saved) \d+", line)
            if line.startswith("saved") and len(seen) == 2:
                timer.start()
    finally:
        limit.cancel()
        process.wait()
    steps = [int(line.split()[1]) for line in seen]
    assert len(steps) >= 2, seen
    return steps[0], steps[-1]


@pytest.mark.slow
def test_kills_while_shards_are_written_in_the_background(tmp_path):
    draw, saved, total = random.Random(SEED), 0, 0
    for _ in range(20):
        loaded, saved = killed_while_it_saves(tmp_path, saved, draw.uniform(0.05, 2.0))
        total += saved - loaded
    print(f"20 kills, {total} checkpoints of shards between them: each run went on from a whole one")
    assert total > 0
