"""Which checkpoints exist, which is the last, which go."""

import pytest

from accelerate.checkpoint import names, rotation


@pytest.fixture
def make(tmp_path):
    def make(number, complete=True):
        folder = tmp_path / f"checkpoint_{number}"
        folder.mkdir()
        (folder / "model.safetensors").touch()
        if not complete:
            (folder / names.INCOMPLETE_MARKER).touch()
        return folder

    return make


def listed(tmp_path):
    return [number for number, _ in rotation.numbered_checkpoints(tmp_path)]


def test_numbers_are_ordered_as_numbers(tmp_path, make):
    for number in (10, 9, 2):
        make(number)
    (tmp_path / "checkpoint_5").touch()  # a file
    (tmp_path / "other").mkdir()
    assert listed(tmp_path) == [2, 9, 10]
    assert rotation.numbered_checkpoints(tmp_path / "missing") == []


def test_any_rank_that_writes_and_an_empty_folder_make_a_checkpoint_incomplete(tmp_path, make):
    folder = make(1)
    assert rotation.is_complete(folder)
    (folder / names.marker_file(3)).touch()
    assert not rotation.is_complete(folder)
    (tmp_path / "checkpoint_2").mkdir()  # killed before the first mark
    assert not rotation.is_complete(tmp_path / "checkpoint_2")


def test_the_latest_complete_one(tmp_path, make, caplog):
    make(9)
    make(10)
    make(11, complete=False)
    assert rotation.latest_complete(tmp_path).endswith("checkpoint_10")
    assert "checkpoint_11" in caplog.text


def test_no_complete_one(tmp_path, make):
    make(0, complete=False)
    with pytest.raises(FileNotFoundError, match="1 incomplete"):
        rotation.latest_complete(tmp_path)
    with pytest.raises(FileNotFoundError, match="missing"):
        rotation.latest_complete(tmp_path / "missing")


@pytest.mark.parametrize(("limit", "left"), [(None, [1, 2, 3]), (5, [1, 2, 3]), (2, [2, 3]), (1, [3])])
def test_the_oldest_go(tmp_path, make, limit, left):
    for number in (1, 2, 3):
        newest = make(number)
    rotation.prune(tmp_path, limit, keep=newest)
    assert listed(tmp_path) == left


def test_the_one_just_written_stays_even_if_its_number_is_low(tmp_path, make):
    newest = make(0)
    make(7)
    rotation.prune(tmp_path, 1, keep=newest)
    assert listed(tmp_path) == [0]


def test_what_a_killed_run_left_goes_and_does_not_count(tmp_path, make):
    make(1)
    make(2, complete=False)
    rotation.prune(tmp_path, 2, keep=make(3))
    assert listed(tmp_path) == [1, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "checkpoint_3"]


def test_a_removal_that_is_cut_short_leaves_no_checkpoint_behind(tmp_path, make, monkeypatch):
    make(1)
    newest = make(2)
    monkeypatch.setattr(rotation.shutil, "rmtree", lambda *args, **kwargs: None)  # killed at once
    rotation.prune(tmp_path, 1, keep=newest)
    assert listed(tmp_path) == [2]
    monkeypatch.undo()
    make(1)
    rotation.prune(tmp_path, 1, keep=newest)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_2"]
