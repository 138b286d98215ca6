"""Training loops, wrapped models, double preparation, gradients and what processes share: one launch for each world size."""

import pytest

SCRIPTS = ("check_gradients.py", "check_training.py", "check_wrappers.py", "check_prepare.py", "check_processes.py")


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training(launch, processes):
    several = ("check_collective_errors.py", *SCRIPTS) if processes > 1 else SCRIPTS
    done = launch("several.py", *several, processes=processes)
    for name in several:
        assert f"done {name}" in done.stdout


@pytest.mark.slow
def test_gradients_of_four_processes(launch):
    assert "ok all" in launch("check_gradients.py", processes=4).stdout


def test_a_rank_that_fails_ends_the_run(launch):
    done = launch("check_collective_errors.py", "one_rank_fails", processes=2, succeeds=False)
    assert "the disk of the last rank is gone" in done.stderr
    assert "ok all" not in done.stdout


def test_what_goes_wrong_in_silence_where_ranks_have_shards(launch):
    assert "ok all" in launch("check_sharded.py", processes=2).stdout


@pytest.mark.slow
def test_replicas_and_layers_of_other_seeds(launch):
    assert "ok all" in launch("check_sharded.py", processes=4).stdout
