"""Checkpoints of real processes: training continues, the peer's layout, errors, other numbers of processes."""

import pytest


@pytest.mark.parametrize("processes", [1, 2])
def test_checkpoints(launch, processes):
    assert "ok all" in launch("check_checkpoint.py", processes=processes).stdout


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2)])
def test_between_numbers_of_processes(launch, tmp_path, writers, readers):
    folder = str(tmp_path / "checkpoint")
    assert "ok written" in launch("check_checkpoint.py", "--write", folder, processes=writers).stdout
    assert "ok read" in launch("check_checkpoint.py", "--read", folder, processes=readers).stdout
