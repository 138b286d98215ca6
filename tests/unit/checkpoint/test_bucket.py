"""Object stores: their URLs, and what is particular to S3."""

import os
import sys

import pytest

from accelerate.checkpoint.manifest import NAME, problems
from accelerate.checkpoint.object_store import ObjectStore
from accelerate.checkpoint.storage import storage_of
from unit.checkpoint.remote_storages import save

pytest.importorskip("fsspec")
pytestmark = pytest.mark.usefixtures("no_pauses")

# -- locations ---------------------------------------------------------------------------------------------------------


def test_locations(memory):
    place = storage_of("memory://run/checkpoints/")
    assert place == ObjectStore("memory://run/checkpoints")
    assert place.child("checkpoint_1").location == "memory://run/checkpoints/checkpoint_1"
    assert place.child("checkpoint_1").parent() == place
    root = place.parent().parent()
    assert root.location == "memory://"
    assert root.parent() == root == storage_of("memory://")
    assert root.child("run").location == "memory://run"
    save(root.child("run"))
    assert [found.name for found in root.entries()] == ["run"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("simplecache::memory://run", "chained"),
        ("memory://run/../other", "'..'"),
        ("memory://run/./other", "'.'"),
        ("nonsense://run", "nonsense"),
    ],
)
def test_urls_that_hold_no_checkpoints(url, message):
    with pytest.raises(ValueError, match=message):
        storage_of(url)


def test_without_fsspec(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r"accelerate\[object-stores\]"):
        storage_of("s3://bucket/run")


def test_without_the_package_of_the_store(monkeypatch):
    known = sys.modules["fsspec.registry"].known_implementations
    monkeypatch.setitem(known, "lost", {"class": "no_such_package.Lost", "err": "Install lost"})
    with pytest.raises(ImportError, match="'lost://run' needs another package: Install lost"):
        storage_of("lost://run")


# -- S3 ----------------------------------------------------------------------------------------------------------------


def test_remembered_listings_are_not_believed(s3):
    import s3fs

    place = storage_of("s3://bucket/stale/checkpoint_0")
    save(place)
    system = s3fs.S3FileSystem()
    folder = storage_of("s3://bucket/stale")
    for path in ("bucket/stale", "bucket/stale/checkpoint_0"):
        system.ls(path)
    assert system.dircache
    (name,) = [name for name in place._store.below() if name.endswith("optimizer.bin")]
    system.find("bucket/stale")
    s3.delete_object(Bucket="bucket", Key=f"stale/checkpoint_0/{name}")
    assert "optimizer.bin is missing" in place.state().reason
    system.ls("bucket/stale")
    s3.put_object(Bucket="bucket", Key="stale/checkpoint_1/model.safetensors", Body=b"")
    assert [number for number, _ in folder.checkpoints()] == [0, 1]
    system.ls("bucket/stale/checkpoint_0")
    s3.delete_object(Bucket="bucket", Key=f"stale/checkpoint_0/{NAME}")
    assert place.state().kind == "incomplete"


def test_a_bucket_is_never_removed(s3):
    s3.create_bucket(Bucket="whole-bucket")
    place = storage_of("s3://whole-bucket")
    save(place)
    assert place.state().kind == "complete"
    place.remove()
    assert place.state().kind == "absent"
    s3.head_bucket(Bucket="whole-bucket")


def test_a_bucket_that_is_missing(s3):
    place = storage_of("s3://no-such-bucket/checkpoint_0")
    assert place.state().kind == "absent"
    with pytest.raises(FileNotFoundError, match="s3://no-such-bucket/checkpoint_0/.* bucket does not exist"):
        save(place)


def test_objects_that_stand_for_folders(s3):
    save(storage_of("s3://bucket/console/checkpoint_0"))
    for key in ("console/", "console/checkpoint_0/", "console/checkpoint_0/empty/"):
        s3.put_object(Bucket="bucket", Key=key, Body=b"")
    place = storage_of("s3://bucket/console").child("checkpoint_0")
    assert [number for number, _ in place.parent().checkpoints()] == [0]
    assert place.state().kind == "complete"
    place.fetch()
    s3.put_object(Bucket="bucket", Key="hollow/", Body=b"")
    assert storage_of("s3://bucket/hollow").state().kind == "absent"


@pytest.mark.slow
def test_a_file_in_parts(s3):
    place = storage_of("s3://bucket/large")
    content = {"model.safetensors": os.urandom(1 << 20) * 120}
    save(place, content)
    folder = place.fetch()
    assert problems(folder, place.state().manifest, deep=True) == []
