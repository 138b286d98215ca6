"""Evaluation loops see the dataset exactly once, on one process and several."""

import pytest


@pytest.mark.parametrize("processes", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_gather_for_metrics(launch, processes):
    assert "ok all" in launch("check_metrics.py", processes=processes).stdout
