"""Checkpoints of real processes: published together, in the background, on separate disks, on other numbers of processes."""

import re
import shutil
import subprocess
import sys

import pytest

from distributed.conftest import SCRIPTS, begun, done, started_by_hand


def test_saving_and_loading_together(launch, tmp_path, monkeypatch):
    """The process of this test leaves what the launched ones read, and reads what they leave."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import check_checkpoint

    places = {name: str(tmp_path / name) for name in ("OF_ONE", "OF_SEVERAL")}
    check_checkpoint.write(places["OF_ONE"])
    launch("several.py", "check_checkpoint.py", "check_saving.py", "check_hostile_folders.py", environment=places)
    check_checkpoint.read(places["OF_SEVERAL"])


def test_nodes_with_disks_of_their_own(tmp_path):
    """Each of two processes has a file system at the same path that the other one does not see."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs "{disk}" && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount file systems")
    check = ("check_saving.py", "every_node_has_its_own")
    own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OWN_DISK": str(disk), "SHARED_DISK": str(tmp_path)}
    nodes = started_by_hand("several.py", *check, size=2, inside=mount, cwd=tmp_path, **own)
    said = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0] and "done check_saving.py" in said[0], said


def test_processes_of_multiprocessing_end_after_their_save(tmp_path):
    command = [sys.executable, str(SCRIPTS / "check_spawned.py"), str(tmp_path / "c")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "ok spawned" in ended.stdout, ended.stderr
    assert (tmp_path / "c" / "accelerate_manifest.json").exists(), ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("how", "loads"), [("path", 1500), ("latest", 500)])
def test_loads_beside_a_run_that_saves_are_each_of_one_save(tmp_path, how, loads):
    program = [sys.executable, str(SCRIPTS / "mixed_loads.py")]
    saver = begun([*program, "save", str(tmp_path), how, "0"], stderr=None)
    try:
        assert saver.stdout.readline() == "saved\n"
        ended = done([*program, "load", str(tmp_path), how, str(loads)])
    finally:
        (tmp_path / "stop").touch()
        saver.wait(timeout=60)
        saver.stdout.close()
    assert ended.returncode == 0, ended.stderr
    saves, mixed, refused = map(int, re.search(r"saves (\d+) mixed (\d+) refused (\d+)", ended.stdout).groups())
    print(ended.stdout)
    assert (mixed, refused) == (0, 0) and saves > 20, ended.stdout + ended.stderr
