"""Writing whole or not at all."""

import os
from unittest.mock import Mock

import pytest

from accelerate.commands.config import config_utils as store
from accelerate.launch.errors import LaunchError


@pytest.mark.parametrize(
    ("name", "as_json", "text"),
    [("c.json", None, '{\n  "a": 1,\n  "b": "\\u00e9"\n}\n'), ("c.json", False, "a: 1\nb: é\n")],
)
def test_text_in_folders_that_are_made(place, name, as_json, text):
    path = place / "deep" / "er" / name
    store.write(path, {"b": "é", "a": 1}, as_json)
    assert path.read_bytes() == text.encode()
    path.chmod(0o600)
    store.write(path, {"b": 1})
    assert os.name != "posix" or path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("broken", ["replace", "chmod"])
@pytest.mark.parametrize(
    ("error", "seen"), [(OSError(28, "No space left on device"), LaunchError), (KeyboardInterrupt, KeyboardInterrupt)]
)
def test_a_write_that_fails_changes_nothing(place, monkeypatch, broken, error, seen):
    (place / "c.yaml").write_text("old")
    monkeypatch.setattr(os, broken, Mock(side_effect=error))
    with pytest.raises(seen) as caught:
        store.write(place / "c.yaml", {"a": 1})
    assert seen is KeyboardInterrupt or "c.yaml cannot be written: No space left on device" in str(caught.value)
    assert (place / "c.yaml").read_text() == "old"
    assert [path.name for path in place.iterdir()] == ["c.yaml"]


def test_places_that_cannot_be_written(place, monkeypatch):
    (place / "file").touch()
    with pytest.raises(LaunchError, match="cannot be written"):
        store.write(place / "file" / "c.yaml", {})
    store.check_writable(place / "new" / "folder" / "c.yaml")
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(LaunchError, match="is no folder that you may write to"):
        store.check_writable(place / "c.yaml")
