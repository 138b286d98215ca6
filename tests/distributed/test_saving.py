"""Checkpoints of real processes: published together, also in the background and on disks of their own; loaded together."""

import shutil
import subprocess
import sys

import pytest

from distributed.conftest import SCRIPTS


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
    (tmp_path / "disk_shared").mkdir()
    if not can_mount(disk):
        pytest.skip("this user may not mount file systems")
    assert "ok nodes" in launch("check_saving.py", "--nodes", str(disk), processes=2).stdout


def test_processes_of_multiprocessing_end_after_their_save(tmp_path):
    command = [sys.executable, str(SCRIPTS / "check_spawned.py"), str(tmp_path / "c")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "ok spawned" in ended.stdout, ended.stderr
    assert (tmp_path / "c" / "accelerate_manifest.json").exists(), ended.stderr
