"""Which checkpoint is the newest whole one, and which go."""

import os

import pytest

from accelerate.checkpoint import names, rotation
from accelerate.checkpoint.formats import write_bytes
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.storage import LocalStorage


@pytest.fixture
def make(tmp_path):
    """Make a checkpoint of a kind: "complete", "foreign", "marked", "truncated" or "empty"."""

    def make(number: int, kind: str = "complete") -> str:
        folder = tmp_path / f"checkpoint_{number}"
        folder.mkdir()
        if kind == "empty":
            return str(folder)
        entry = write_bytes(folder / "model.safetensors", b"weights")
        if kind in ("complete", "truncated"):
            Manifest({"model.safetensors": entry}).write(folder)
        if kind == "truncated":
            (folder / "model.safetensors").write_bytes(b"weigh")
        if kind == "marked":
            (folder / names.INCOMPLETE_MARKER).touch()
        return str(folder)

    return make


def listed(tmp_path) -> list[str]:
    return sorted(os.listdir(tmp_path))


def test_the_newest_come_first_and_what_is_not_whole_is_told(tmp_path, make):
    for number, kind in enumerate(["complete", "foreign", "complete", "marked", "truncated", "empty"], start=8):
        make(number, kind)
    found, passed = rotation.newest_first(LocalStorage(tmp_path))
    assert [place.name for place in found] == ["checkpoint_10", "checkpoint_9", "checkpoint_8"]
    assert len(passed) == 3
    assert "checkpoint_13: the folder is empty" in passed[0]
    assert "model.safetensors has 5 bytes, but 7 were written" in passed[1]
    assert "did not come to its end" in passed[2]


def test_a_checkpoint_itself_and_nothing(tmp_path, make):
    alone = LocalStorage(make(3))
    assert rotation.newest_first(alone) == ([alone], [])
    assert rotation.newest_first(LocalStorage(tmp_path / "missing")) == ([], [])


@pytest.mark.parametrize(("limit", "left"), [(None, [1, 2, 3]), (5, [1, 2, 3]), (2, [2, 3]), (1, [3])])
def test_the_oldest_go(tmp_path, make, limit, left):
    paths = [make(number) for number in (1, 2, 3)]
    removed = rotation.prune(LocalStorage(tmp_path), limit, keep=[paths[-1], None])
    assert listed(tmp_path) == [f"checkpoint_{number}" for number in left]
    assert removed == [path for number, path in enumerate(paths, start=1) if number not in left]


def test_the_one_just_written_and_the_one_loaded_stay(tmp_path, make):
    newest, _, loaded, _ = make(0), make(7), make(2), make(3)
    rotation.prune(LocalStorage(tmp_path), 1, keep=[newest, loaded])
    assert listed(tmp_path) == ["checkpoint_0", "checkpoint_2"]


def test_only_whole_ones_count_and_go(tmp_path, make):
    make(1)
    make(2, "truncated")
    make(4, "marked")
    rotation.prune(LocalStorage(tmp_path), 1, keep=[make(5)])
    assert listed(tmp_path) == ["checkpoint_2", "checkpoint_4", "checkpoint_5"]


def test_what_killed_saves_left_goes(tmp_path, make):
    kept = make(1)
    for prefix in (names.STAGING_PREFIX, names.REMOVED_PREFIX):
        (tmp_path / f"{prefix}checkpoint_9").mkdir()
    (tmp_path / ".users_own").mkdir()
    rotation.prune(LocalStorage(tmp_path), None, keep=[kept])
    assert listed(tmp_path) == [".users_own", "checkpoint_1"]


def test_what_cannot_be_removed_is_told_and_the_rest_goes(tmp_path, make, monkeypatch, caplog):
    make(1), make(2)
    real = LocalStorage.remove

    def remove(place):
        if place.name == "checkpoint_1":
            raise PermissionError("not yours")
        real(place)

    monkeypatch.setattr(LocalStorage, "remove", remove)
    rotation.prune(LocalStorage(tmp_path), 1, keep=[make(3)])
    assert listed(tmp_path) == ["checkpoint_1", "checkpoint_3"]
    assert "not yours" in caplog.text
