"""Runs of transformers' Trainer, killed at random moments in and around their saves: each continues, with the losses of one never killed.

One process and two under our launcher. `make test-slow` kills sixty runs, a third of them with saves in the background; the quick version six.
"""

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from interop.launching import SCRIPTS, finished, last_figures, need, starter
from interop.scripts.killing import wait_and_kill, written

pytestmark = pytest.mark.interop
SCRIPT = str(SCRIPTS / "trainer_kills.py")
STEPS = 10
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
QUICK = [(1, "async", 1, 2), (1, "apply", 1, 2)]
SLOW = [
    (1, "mixin", 1, 12), (1, "apply", 2, 12), (1, "async", 1, 12), (2, "mixin", 1, 8), (2, "apply", 2, 8), (2, "async", 2, 8),
]  # fmt: skip


def losses(folder, ranks):
    return {(rank, step): values for rank in range(ranks) for step, values in written(folder, rank).items()}


def alive(process):
    return process.poll() is None


def words_of(child):
    """The command line of a process; one that has ended meanwhile has none."""
    try:
        return child.cmdline()
    except psutil.NoSuchProcess:
        return []


def end(process, whole):
    """Kill the launcher and its ranks, or one rank alone, which the launcher then ends the others for."""
    if not alive(process):  # it came to its end before
        assert process.returncode == 0
        return
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in children if any("trainer_kills" in word for word in words_of(child))]
    for victim in [psutil.Process(process.pid), *children] if whole or not ranks else ranks[:1]:
        if victim.is_running():
            victim.send_signal(signal.SIGKILL)
    process.wait(60)
    psutil.wait_procs(children, 60)


@pytest.mark.parametrize(
    "processes, way, limit, kills", [*QUICK, *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW)]
)
def test_every_killed_run_goes_on_with_the_same_losses(processes, way, limit, kills, tmp_path):
    need("transformers")
    pytest.importorskip("fcntl", reason="runs are killed as on Linux")
    run = tmp_path / "run"
    if processes == 1:
        found = last_figures(finished([sys.executable, SCRIPT, "--kill", "5", str(kills), str(run), way, str(limit)]))
        assert found["killed"] == kills and found["in_saves"] >= kills // 2, found
        return
    environment = {**os.environ, **SETTINGS}
    command = [*starter(processes, ours=True), SCRIPT]
    draw, in_saves, killed, folders, reference = random.Random(11), 0, 0, [run], [str(tmp_path / "reference")]
    for number in range(kills):
        if (folders[-1] / f"checkpoint-{STEPS}").exists():
            folders.append(tmp_path / f"run_{number}")
        with open(tmp_path / "log.txt", "ab") as log:
            line = [*command, str(folders[-1]), way, str(limit), *reference]
            process = subprocess.Popen(line, env=environment, stdout=log, stderr=log)
            kill = partial(end, process, draw.random() < 0.5)
            in_saves += wait_and_kill(folders[-1], draw, kill, partial(alive, process), number % 3 != 2)
        killed += process.returncode != 0
        reference = []
    whole = losses(tmp_path / "reference", processes)
    for folder in folders:
        finished([*command, str(folder), way, str(limit)])
        assert losses(folder, processes) == whole
        assert all(len(values) == 1 for values in whole.values()) and len(whole) == processes * STEPS
        # A run that is killed between the publishing of its last checkpoint and the removal of an older one leaves that.
        assert limit <= len(list(folder.glob("checkpoint-*"))) <= limit + 1 and not list(folder.glob(".saving_*"))
    assert in_saves and killed > kills // 2, (tmp_path / "log.txt").read_text("utf-8")[-4000:]


@pytest.mark.slow
def test_a_run_that_the_launcher_is_told_to_stop_saves_and_goes_on(tmp_path):
    need("transformers")
    environment = {**os.environ, **SETTINGS, "STEP_S": "0.2"}
    command, run, reference = [*starter(2, ours=True), SCRIPT], tmp_path / "run", tmp_path / "reference"
    with open(tmp_path / "log.txt", "ab") as log:
        process = subprocess.Popen(
            [*command, str(run), "apply", "1", str(reference)], env=environment, stdout=log, stderr=log
        )
        while alive(process) and not (run / "losses_0.txt").exists():
            time.sleep(0.05)
        process.terminate()
        assert process.wait(120) == 75, (tmp_path / "log.txt").read_text("utf-8")[-6000:]
    (last,) = run.glob("checkpoint-*")
    assert 0 < int(last.name.partition("-")[2]) < STEPS and not (run / "done.json").exists()
    finished([*command, str(run), "apply", "1"])
    found = losses(run, 2)
    assert found == losses(reference, 2) and len(found) == 2 * STEPS
    # No step was taken twice.
    assert [(run / f"losses_{rank}.txt").read_text("utf-8").count("\n") for rank in range(2)] == [STEPS] * 2
