"""DDP, accumulation and precision against one process on the whole batch."""

import pytest


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_gradients_equal_the_whole_batch(launch, processes):
    assert "ok gradients" in launch("check_gradients.py", processes=processes).stdout
