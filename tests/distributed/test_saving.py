"""Checkpoints of real processes: published together, also in the background and on disks of their own; loaded together."""

import shutil
import subprocess

import pytest


@pytest.mark.parametrize("processes", [1, 3])
def test_saving_and_loading_together(launch, processes):
    assert "ok all" in launch("check_saving.py", processes=processes).stdout


def can_mount(folder) -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_nodes_with_disks_of_their_own(launch, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("this user may not mount file systems")
    assert "ok nodes" in launch("check_saving.py", "--nodes", str(disk), processes=2).stdout
