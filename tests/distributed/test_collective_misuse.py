"""``save_state`` and ``load_state`` on some ranks only, or with different arguments: an error instead of a hang."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "check_misuse.py"


QUICK = ("saves_on_main", "saves_to_different_paths", "saves_and_loads", "waits_in_barrier", "waits_for_slow_main")
SLOW = ("saves_on_main", "waits_for_another_program", "waits_for_two_that_wait_for_each_other")


@pytest.mark.parametrize(("processes", "cases"), [(2, QUICK), pytest.param(3, SLOW, marks=pytest.mark.slow)])
def test_misuse_is_an_error_within_seconds_and_slow_ranks_are_waited_for(launch, processes, cases):
    done = launch(SCRIPT, *cases, processes=processes)
    assert [line for line in done.stdout.splitlines() if line == "ok all"] == ["ok all"] * processes


@pytest.mark.slow
def test_a_rank_that_has_ended_is_not_waited_for(launch):
    assert "rank 0 heard after" in launch(SCRIPT, "saves_after_the_end_of_another").stdout


def started_by_hand(folder, case, size):
    """Start ranks without a launcher: one that dies takes nobody along, and rank 0 holds the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = [sys.executable, str(Path(__file__).parent / "scripts" / SCRIPT), case]
    run = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    run |= {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            program,
            env={**os.environ, **run, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


def test_a_rank_that_is_killed_while_it_writes_is_not_waited_for(tmp_path):
    processes = started_by_hand(tmp_path, "dies_while_saving", 3)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 0], outputs
    assert "rank 0 heard after" in outputs[0] and "rank 2 heard after" in outputs[2]


@pytest.mark.slow
def test_a_rank_that_outlives_the_one_with_the_store_ends_in_peace(tmp_path):
    first, second = started_by_hand(tmp_path, "ends_after_main", 2)
    outputs = [first.communicate(timeout=120)[0]]
    (tmp_path / "main-has-ended").touch()
    outputs.append(second.communicate(timeout=120)[0])
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert "Connection was likely closed" not in "".join(outputs)
