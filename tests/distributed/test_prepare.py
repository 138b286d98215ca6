"""Double-prepare detection, on one process and two."""

import pytest


@pytest.mark.parametrize("processes", [1, 2])
def test_prepare_twice(launch, processes):
    done = launch("check_prepare.py", processes=processes)
    assert done.stdout.count("ok ") == 9
