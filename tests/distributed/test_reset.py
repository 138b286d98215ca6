"""The state reset under live objects, on one process and two."""

import pytest


@pytest.mark.parametrize("processes", [1, 2])
def test_reset_leaves_live_objects_whole(launch, processes):
    assert "ok reset" in launch("check_reset.py", processes=processes).stdout
