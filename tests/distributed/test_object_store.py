"""Checkpoints of real processes in an S3 store, which runs in the process of the tests."""

import pytest

from unit.checkpoint.conftest import s3, s3_server  # noqa: F401


@pytest.mark.usefixtures("s3")
def test_object_store(launch):
    launch("several.py", "check_object_store.py", environment={"STORE_URL": "s3://bucket/runs"})
