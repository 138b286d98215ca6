"""Checkpoints of real processes in an S3 store, which runs in the process of the tests."""

import os
import subprocess
import sys

import pytest

from unit.checkpoint.conftest import s3, s3_server  # noqa: F401


@pytest.mark.usefixtures("s3")
def test_object_store(launch):
    assert "ok all" in launch("check_object_store.py", "s3://bucket/runs").stdout


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
def test_commands(launch, tmp_path):
    """`accelerate checkpoint` on what the processes left."""
    launch(
        "check_object_store.py", "s3://bucket/commands", "checkpoints_are_numbered_and_old_ones_removed", processes=1
    )

    def command(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "accelerate.commands.accelerate_cli", "checkpoint", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout

    import s3fs

    (project,) = s3fs.S3FileSystem().ls("bucket/commands")
    folder = f"s3://{project}"
    listed = command("ls", folder)
    assert "checkpoint_2" in listed and "checkpoint_3" in listed and listed.count("complete") == 2
    command("verify", f"{folder}/checkpoints/checkpoint_3")
    command("prune", folder, "--keep", "1", "--yes")
    listed = command("ls", folder)
    assert "checkpoint_2" not in listed and "checkpoint_3" in listed
    command("export", f"{folder}/checkpoints/checkpoint_3", str(tmp_path / "exported"))
    assert "model.safetensors" in os.listdir(tmp_path / "exported")
