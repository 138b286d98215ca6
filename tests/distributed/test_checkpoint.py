"""Checkpoints of real processes: published together, in the background, on disks of their own, on other numbers of processes."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from distributed.conftest import SCRIPTS


def test_saving_and_loading_together(launch, tmp_path, monkeypatch):
    """The process of this test leaves what the launched ones read, and reads what they leave."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import check_checkpoint

    places = {name: str(tmp_path / name) for name in ("OF_ONE", "OF_SEVERAL")}
    check_checkpoint.write(places["OF_ONE"])
    assert "ok all" in launch("check_saving.py", environment=places).stdout
    check_checkpoint.read(places["OF_SEVERAL"])


def test_nodes_with_disks_of_their_own(tmp_path):
    """Each of two processes has a file system at the same path that the other one does not see."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs "{disk}" && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount file systems")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OWN_DISK": str(disk), "SHARED_DISK": str(tmp_path)}
    nodes = [
        subprocess.Popen(
            [*mount, sys.executable, str(SCRIPTS / "check_saving.py")],
            env={**os.environ, **variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0] and "ok nodes" in said[0], said


def test_processes_of_multiprocessing_end_after_their_save(tmp_path):
    command = [sys.executable, str(SCRIPTS / "check_spawned.py"), str(tmp_path / "c")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "ok spawned" in ended.stdout, ended.stderr
    assert (tmp_path / "c" / "accelerate_manifest.json").exists(), ended.stderr
