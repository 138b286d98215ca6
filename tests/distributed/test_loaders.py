"""Loaders across processes: sharded and dispatched, in and beside each other, and what an evaluation gathers of them."""

import pytest

SLOW = pytest.mark.slow


@pytest.mark.parametrize("processes", [2, *(pytest.param(number, marks=SLOW) for number in (1, 3, 4))])
def test_loaders_across_processes(launch, processes):
    assert "ok all" in launch("check_loaders.py", processes=processes).stdout


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_many_generated_loops(launch, processes, seed):
    done = launch("check_metrics_property.py", "1000", "--seed", str(seed), processes=processes)
    assert "ok 1000 cases" in done.stdout


def test_a_lost_process_ends_the_others(launch):
    assert "survived" not in launch("check_streams.py", succeeds=False).stdout
