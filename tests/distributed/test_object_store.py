"""Checkpoints of real processes in an S3 store, which runs in the process of the tests."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def address():
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    server.stop()


@pytest.fixture
def environment(address):
    """What a process needs to find the store, with a bucket `bucket` in it."""
    import boto3

    told = {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    os.environ.update(told)
    boto3.client("s3").create_bucket(Bucket="bucket")
    return told


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_object_store(launch, environment, processes):
    done = launch("check_object_store.py", "s3://bucket/runs", processes=processes, environment=environment)
    assert "ok all" in done.stdout


@pytest.mark.slow
def test_commands(launch, environment, tmp_path):
    """`accelerate checkpoint` on what the processes left."""
    url = "s3://bucket/commands"
    check = "checkpoints_are_numbered_and_old_ones_removed"
    launch("check_object_store.py", url, check, processes=1, environment=environment)

    def command(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "accelerate.commands.accelerate_cli", "checkpoint", *arguments],
            env={**os.environ, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout

    import s3fs

    (project,) = s3fs.S3FileSystem(endpoint_url=environment["AWS_ENDPOINT_URL"]).ls("bucket/commands")
    folder = f"s3://{project}"
    listed = command("ls", folder)
    assert "checkpoint_2" in listed and "checkpoint_3" in listed and listed.count("complete") == 2
    command("verify", f"{folder}/checkpoints/checkpoint_3")
    command("prune", folder, "--keep", "1", "--yes")
    listed = command("ls", folder)
    assert "checkpoint_2" not in listed and "checkpoint_3" in listed
    command("export", f"{folder}/checkpoints/checkpoint_3", str(tmp_path / "exported"))
    assert "model.safetensors" in os.listdir(tmp_path / "exported")
