"""Checkpoints of real processes in an S3 store, which runs in the process of the tests."""

import pytest

from scale import object_store
from unit.checkpoint.conftest import s3, s3_server  # noqa: F401


@pytest.mark.usefixtures("s3")
def test_object_store(launch):
    launch("several.py", "check_object_store.py", environment={"STORE_URL": "s3://bucket/runs"})


@pytest.mark.slow
def test_each_node_writes_and_reads_what_its_ranks_need():
    """Two nodes of two ranks, a sharded checkpoint: written once, and each node reads the files that hold its shards, once."""
    found = object_store.run(layers=4)
    for written, needed in zip(found["save"]["written"], found["save"]["needed"], strict=True):
        assert needed <= written <= 1.05 * needed
    for read, needed in zip(found["load"]["read"], found["load"]["needed"], strict=True):
        # Every rank reads what rank 0 saved for all, and that is in its file.
        assert read <= 1.05 * needed * (1 + 1 / object_store.LOCAL)
