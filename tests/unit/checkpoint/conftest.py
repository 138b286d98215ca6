"""Object stores for the tests of this folder."""

import os
import uuid

import pytest


@pytest.fixture(scope="session")
def s3_server():
    """The address of an S3 server that runs here."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    server.stop()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """A client of an S3 server with a bucket `bucket`, which s3fs finds by the environment."""
    import boto3
    import s3fs

    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def memory():
    """The class of the file system behind `memory://`, empty."""
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield MemoryFileSystem
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "s3"])
def base(request):
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://bucket/{uuid.uuid4().hex}"
    request.getfixturevalue("memory")
    return "memory://run"
