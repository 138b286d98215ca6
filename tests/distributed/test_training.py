"""Training loops, wrapped models and what processes share, on one process and two."""

import pytest


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("script", ["check_training.py", "check_wrappers.py", "check_processes.py"])
def test_training(launch, script, processes):
    assert "ok all" in launch(script, processes=processes).stdout


def test_errors_reach_every_rank(launch):
    assert "ok all" in launch("check_collective_errors.py", processes=2).stdout


def test_a_rank_that_fails_ends_the_run(launch):
    done = launch("check_collective_errors.py", "one_rank_fails", processes=2, succeeds=False)
    assert "the disk of the last rank is gone" in done.stderr
    assert "ok all" not in done.stdout
