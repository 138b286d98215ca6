"""Which of several running loops is meant, on one process and two."""

import pytest


@pytest.mark.parametrize("processes", [1, 2])
def test_the_right_loader_is_active(launch, processes):
    assert "ok all" in launch("check_active_loader.py", processes=processes).stdout
