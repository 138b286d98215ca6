"""Collectives, splitting, order, disagreement, reset and adoption between real processes."""

import pytest


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_operations(launch, processes):
    assert "ok operations" in launch("check_operations.py", processes=processes).stdout
