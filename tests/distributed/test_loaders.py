"""Sharded and dispatched loaders across processes."""

import pytest


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_nothing_is_lost_and_all_are_in_step(launch, processes):
    assert "ok loaders" in launch("check_loaders.py", processes=processes).stdout
