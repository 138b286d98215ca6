"""Sharded strategies between processes: what used to go wrong without an error."""

import pytest


def test_what_goes_wrong_in_silence(launch):
    assert "ok all" in launch("check_sharded.py", processes=2).stdout


@pytest.mark.slow
def test_replicas_and_layers_of_other_seeds(launch):
    assert "ok all" in launch("check_sharded.py", processes=4).stdout
