"""Evaluation loops of generated shapes, in real processes: each sample once, in the order of the dataset."""

import pytest


@pytest.mark.parametrize("processes", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_generated_loops(launch, processes):
    assert "ok 60 cases" in launch("check_metrics_property.py", "60", processes=processes).stdout


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_many_generated_loops(launch, processes, seed):
    done = launch("check_metrics_property.py", "1000", "--seed", str(seed), processes=processes)
    assert "ok 1000 cases" in done.stdout
