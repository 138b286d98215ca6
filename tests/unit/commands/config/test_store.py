"""Writing whole or not at all."""

import os

import pytest

from accelerate.commands.config import store
from accelerate.launch.errors import LaunchError


def test_folders_are_made(place):
    store.write(place / "deep" / "er" / "c.yaml", "a: 1\n")
    assert (place / "deep" / "er" / "c.yaml").read_text() == "a: 1\n"


@pytest.mark.parametrize("broken", ["fsync", "replace", "chmod"])
def test_a_write_that_fails_changes_nothing(place, monkeypatch, broken):
    (place / "c.yaml").write_text("old")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(LaunchError, match="c.yaml cannot be written: No space left on device"):
        store.write(place / "c.yaml", "new")
    assert (place / "c.yaml").read_text() == "old"
    assert [path.name for path in place.iterdir()] == ["c.yaml"]


def test_a_write_that_is_interrupted_leaves_nothing(place, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        store.write(place / "c.yaml", "new")
    assert list(place.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_permissions(place):
    mask = os.umask(0o027)
    try:
        store.write(place / "c.yaml", "a")
        assert (place / "c.yaml").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(mask)
    os.chmod(place / "c.yaml", 0o600)
    store.write(place / "c.yaml", "b")
    assert (place / "c.yaml").stat().st_mode & 0o777 == 0o600


def test_places_that_cannot_be_written(place, monkeypatch):
    (place / "file").touch()
    with pytest.raises(LaunchError, match="is a folder; name a file in it"):
        store.check_writable(place)
    with pytest.raises(LaunchError, match="is no folder that you may write to"):
        store.check_writable(place / "file" / "c.yaml")
    store.check_writable(place / "new" / "folder" / "c.yaml")
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(LaunchError, match="is no folder that you may write to"):
        store.check_writable(place / "c.yaml")
    with pytest.raises(LaunchError, match="cannot be written"):
        store.write(place / "file" / "c.yaml", "a")


def test_text_other_than_english(place):
    assert store.as_yaml({"a": "é"}) == "a: é\n"
    store.write(place / "c.yaml", "é")
    assert (place / "c.yaml").read_bytes() == "é".encode()
