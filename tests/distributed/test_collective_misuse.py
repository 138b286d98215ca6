"""``save_state`` and ``load_state`` on some ranks only, or with different arguments: an error instead of a hang."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "check_misuse.py"


def heard(done):
    """Return after how many seconds each rank that called heard of it."""
    return {int(rank): float(s) for rank, s in re.findall(r"rank (\d+) heard after ([\d.]+) s", done.stdout)}


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_saving_on_the_main_process_alone_is_found_out_within_seconds(launch, processes):
    done = launch(SCRIPT, "saves_on_main", processes=processes)
    assert list(heard(done)) == [0]


@pytest.mark.slow
def test_a_script_that_saves_on_the_main_process_alone_ends_with_the_reason(launch):
    done = launch(SCRIPT, "saves_on_main_and_fails", succeeds=False)
    assert "CollectiveMisuse: save_state was called by rank 0, but rank 1 will not call it" in done.stderr


@pytest.mark.slow
def test_every_rank_that_called_hears_of_it(launch):
    done = launch(SCRIPT, "saves_on_all_but_one", processes=3)
    assert sorted(heard(done)) == [0, 1]


@pytest.mark.parametrize(
    "case, processes, ranks",
    [
        pytest.param("waits_in_barrier", 2, [0], marks=pytest.mark.slow),
        ("saves_to_different_paths", 3, [0, 1, 2]),
        pytest.param("saves_and_loads", 2, [0, 1], marks=pytest.mark.slow),
        pytest.param("saves_after_the_end_of_another", 2, [0], marks=pytest.mark.slow),
    ],
)
def test_misuse_is_an_error_on_all_that_called(launch, case, processes, ranks):
    assert sorted(heard(launch(SCRIPT, case, processes=processes))) == ranks


@pytest.mark.parametrize(
    "case, processes",
    [
        ("waits_for_slow_main", 2),
        pytest.param("waits_for_another_program", 2, marks=pytest.mark.slow),
        pytest.param("waits_for_two_that_wait_for_each_other", 3, marks=pytest.mark.slow),
    ],
)
def test_slow_ranks_are_waited_for(launch, case, processes):
    assert f"ok {case}" in launch(SCRIPT, case, processes=processes).stdout


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
