"""A checkpoint takes its place in one step, whatever happens in between; what is the user's own stays."""

import contextlib
import os
import weakref
from pathlib import Path

import pytest

from accelerate.checkpoint import lock, names, storage
from accelerate.checkpoint.formats import describe
from accelerate.checkpoint.manifest import NAME, Manifest
from accelerate.checkpoint.storage import LocalStorage, storage_of


def write(place: LocalStorage, text: str, files: tuple[str, ...] = ("model.safetensors", "sub/more.bin")) -> str:
    """Stage a checkpoint whose files have some text."""
    folder = place.stage()
    for name in files:
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
    Manifest({name: describe(os.path.join(folder, name)) for name in files}).write(folder)
    return folder


def content(place: LocalStorage) -> str:
    """The text of a whole checkpoint; fails for one that is not whole."""
    state = place.state()
    assert state.kind == "complete", state
    folder = place.fetch()
    texts = {Path(folder, name).read_text() for name in state.manifest.files}
    assert len(texts) == 1, texts
    return texts.pop()


def make(path, text: str = "old", **options) -> LocalStorage:
    place = LocalStorage(path)
    write(place, text, **options)
    place.publish()
    return place


def test_nothing_is_there_until_it_is_published(tmp_path):
    place = LocalStorage(tmp_path / "run" / "checkpoint_0")
    write(place, "new")
    assert place.state().kind == "absent" and place.parent().entries() == []
    place.publish()
    assert content(place) == "new"
    assert os.listdir(tmp_path / "run") == ["checkpoint_0"]
    assert place.size() > 6


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_old_one_stays_until_the_new_one_is_there_and_the_users_files_stay(tmp_path, monkeypatch, exchanges):
    place = make(tmp_path / "c", files=("model.safetensors", "old_only.bin"))
    (tmp_path / "c" / "notes.txt").write_text("mine")
    (tmp_path / "c" / "logs").mkdir()
    if not exchanges:
        monkeypatch.setattr(storage, "exchange", lambda left, right: False)
    write(place, "new")
    assert content(place) == "old"
    place.publish()
    assert content(place) == "new"
    assert sorted(os.listdir(tmp_path / "c")) == sorted(["model.safetensors", "sub", NAME, "notes.txt", "logs"])
    assert os.listdir(tmp_path) == ["c"]


def test_the_kernel_exchanges_folders(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x").touch()
    if not storage.exchange(str(tmp_path / "a"), str(tmp_path / "b")):
        pytest.skip("this system cannot exchange folders")
    assert os.listdir(tmp_path / "b") == ["x"] and os.listdir(tmp_path / "a") == []
    assert not storage.exchange(str(tmp_path / "a"), str(tmp_path / "missing"))


_locks: "weakref.WeakSet[lock.Lock]" = weakref.WeakSet()


@pytest.fixture(autouse=True)
def locks(monkeypatch):
    """All locks that are made."""
    make = lock.Lock.__init__

    def noted(self, *args):
        make(self, *args)
        _locks.add(self)

    monkeypatch.setattr(lock.Lock, "__init__", noted)
    monkeypatch.setattr(lock, "PATIENCE_S", 1.0)


class Killed(BaseException):
    """The process ends here."""


def die():
    """The system drops the locks of a process that is killed."""
    for held in list(_locks):
        if held._descriptor >= 0:
            os.close(held._descriptor)
            held._descriptor = -1
    raise Killed


def kill_at(monkeypatch, number: int, exchanges: bool) -> list[str]:
    """End before the n-th step that changes the file system; return the list of steps, which grows."""
    steps: list[str] = []

    def guarded(name, function):
        def step(*args, **kwargs):
            steps.append(name)
            if len(steps) == number:
                die()
            return function(*args, **kwargs)

        return step

    real = storage.exchange
    monkeypatch.setattr(storage.os, "rename", guarded("rename", os.rename))
    monkeypatch.setattr(storage.os, "unlink", guarded("unlink", os.unlink))
    monkeypatch.setattr(storage.os, "rmdir", guarded("rmdir", os.rmdir))
    monkeypatch.setattr(storage.shutil, "rmtree", guarded("rmtree", storage.shutil.rmtree))
    monkeypatch.setattr(storage, "exchange", guarded("exchange", real if exchanges else lambda left, right: False))
    return steps


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("first", ["complete", "foreign", "absent"])
def test_killed_at_any_step_of_publishing_a_whole_one_is_there(tmp_path, monkeypatch, exchanges, first):
    for number in range(1, 40):
        folder = tmp_path / f"{number}"
        place = LocalStorage(folder / "c")
        if first == "complete":
            make(folder / "c")
        elif first == "foreign":
            os.makedirs(folder / "c")
            (folder / "c" / "model.safetensors").write_text("old")
        if first != "absent":
            (folder / "c" / "notes.txt").write_text("mine")
        write(place, "new")
        with monkeypatch.context() as patch:
            steps = kill_at(patch, number, exchanges)
            try:
                place.publish()
                ended = True
            except Killed:
                ended = False
        state = place.state()
        if first == "absent" and state.kind == "absent":
            assert not ended
        elif state.kind == "foreign":
            assert first == "foreign" and not ended
        else:
            assert content(place) in ("old", "new"), (number, steps)
        # Whoever saves next goes on from there.
        write(place, "next")
        place.publish()
        assert content(place) == "next", (number, steps)
        assert (first == "absent") or (folder / "c" / "notes.txt").read_text() == "mine", (number, steps)
        assert os.listdir(folder) == ["c"], (number, steps)
        assert not (folder / "c" / names.PUBLISHING_MARKER).exists()
        if ended:
            break
    else:
        pytest.fail("the publishing has more steps than were tried")
    assert number > (1 if first == "absent" else 4)


@pytest.mark.parametrize("exchanges", [True, False])
def test_killed_while_recovering(tmp_path, monkeypatch, exchanges):
    for outer in range(1, 8):
        for number in range(1, 12):
            folder = tmp_path / f"{outer}.{number}"
            place = make(folder / "c")
            (folder / "c" / "notes.txt").write_text("mine")
            write(place, "new")
            for step, at in ((place.publish, outer), (place.recover, number)):
                with monkeypatch.context() as patch:
                    kill_at(patch, at, exchanges)
                    with contextlib.suppress(Killed):
                        step()
                assert content(place) in ("old", "new")
            write(place, "next")
            place.publish()
            assert content(place) == "next" and (folder / "c" / "notes.txt").exists()


def test_where_the_folder_cannot_be_exchanged_it_is_filled_in_place(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    monkeypatch.chdir(folder)
    place = LocalStorage(".")
    assert os.path.dirname(place.staging()) == str(folder)
    for text in ("first", "second"):
        write(place, text)
        place.publish()
        assert content(place) == text and os.getcwd() == str(folder) and os.path.exists("notes.txt")
    assert sorted(os.listdir(tmp_path)) == ["here"]
    assert sorted(os.listdir()) == sorted(["model.safetensors", "sub", NAME, "notes.txt"])


@pytest.mark.parametrize("links", [True, False])
def test_killed_at_any_step_of_filling_in_place_a_whole_one_is_there(tmp_path, monkeypatch, links):
    def refuse(*_):
        raise OSError("this file system has no links")

    monkeypatch.setattr(storage.os, "link", storage.os.link if links else refuse)
    for number in range(1, 60):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        (folder / "notes.txt").write_text("mine")
        place = LocalStorage(".")
        write(place, "old", files=("model.safetensors", "sub/more.bin", "old_only.bin"))
        place.publish()
        write(place, "new")
        with monkeypatch.context() as patch:
            steps = kill_at(patch, number, True)
            try:
                place.publish()
                ended = True
            except Killed:
                ended = False
        assert content(LocalStorage(folder)) in ("old", "new"), (number, steps)
        assert LocalStorage(tmp_path).entries() == [
            LocalStorage(tmp_path / str(n)) for n in sorted(range(1, number + 1), key=str)
        ]
        # Whoever saves next need not stand in it.
        monkeypatch.chdir(tmp_path if number % 2 else folder)
        if number % 3 == 0:
            with monkeypatch.context() as patch, contextlib.suppress(Killed):
                kill_at(patch, number // 3, True)
                LocalStorage(folder).stage()
            assert content(LocalStorage(folder)) in ("old", "new"), (number, steps)
        next_place = LocalStorage(folder)
        write(next_place, "next")
        next_place.publish()
        assert content(LocalStorage(folder)) == "next", (number, steps)
        assert sorted(os.listdir(folder)) == sorted(["model.safetensors", "sub", NAME, "notes.txt"]), (number, steps)
        if ended:
            break
    assert ended and number > 6


def test_a_marker_that_a_killed_publish_left_does_not_bring_the_former_one_back(tmp_path, monkeypatch):
    for number in range(1, 12):
        place = make(tmp_path / str(number))
        write(place, "new")
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            kill_at(patch, number, True)
            place.publish()
        write(place, "next")
        for later in range(1, 12):
            with monkeypatch.context() as patch, contextlib.suppress(Killed):
                kill_at(patch, later, True)
                place.publish()
            if content(place) == "next":
                place.recover()
                assert content(place) == "next", (number, later)
                break
            write(place, "next")


def test_what_only_the_former_manifest_lists_is_not_taken_for_the_users_own(tmp_path, monkeypatch):
    for number in range(1, 12):
        place = make(tmp_path / str(number), files=("model.safetensors", "a_hook's.json", "z_hook's.json"))
        write(place, "new", files=("model.safetensors",))
        with monkeypatch.context() as patch:
            real, removed = os.unlink, []

            def unlink(path, *, dir_fd=None, removed=removed, real=real, number=number):
                removed.append(path)
                if len(removed) == number:
                    die()
                real(path, dir_fd=dir_fd)

            patch.setattr(storage.os, "unlink", unlink)
            with contextlib.suppress(Killed):
                place.publish()
        write(place, "next", files=("model.safetensors",))
        place.publish()
        assert sorted(os.listdir(tmp_path / str(number))) == sorted([NAME, "model.safetensors"]), number


def test_changing_the_working_directory_during_a_save_does_not_matter(tmp_path, monkeypatch):
    place = make(tmp_path / "c")
    write(place, "new")
    monkeypatch.chdir(tmp_path / "c")
    place.publish()
    assert content(place) == "new"


def test_kinds_of_folders(tmp_path):
    place = make(tmp_path / "c")
    (tmp_path / "c" / "sub" / "more.bin").write_text("longer than it was")
    state = place.state()
    assert state.kind == "incomplete" and "sub/more.bin has 18 bytes, but 3 were written" in state.reason
    (tmp_path / "c" / "sub" / "more.bin").unlink()
    assert "sub/more.bin is missing" in place.state().reason
    (tmp_path / "c" / NAME).write_text("{")
    assert place.state().kind == "incomplete" and not place.state().loads
    (tmp_path / "c" / NAME).unlink()
    assert place.state().kind == "foreign" and place.state().loads
    (tmp_path / "c" / names.generators_file(0)).touch()
    assert place.state().kind == "incomplete" and "manifest" in place.state().reason
    (tmp_path / "d").mkdir()
    assert "empty" in LocalStorage(tmp_path / "d").state().reason
    (tmp_path / "d" / ".incomplete_1").touch()
    assert "did not come to its end" in LocalStorage(tmp_path / "d").state().reason
    (tmp_path / "f").touch()
    assert LocalStorage(tmp_path / "f").state().kind == "absent"
    with pytest.raises(NotADirectoryError, match="is one"):
        LocalStorage(tmp_path / "f").stage()


def test_numbered_checkpoints_in_order(tmp_path):
    for number in (10, 9, 2):
        make(tmp_path / f"checkpoint_{number}")
    (tmp_path / "checkpoint_x").mkdir()
    (tmp_path / ".saving_checkpoint_3").mkdir()
    here = LocalStorage(tmp_path)
    assert [number for number, _ in here.checkpoints()] == [2, 9, 10]
    assert here.checkpoints()[-1][1] == here.child("checkpoint_10")
    assert here.child("checkpoint_2").parent() == here and len({here, LocalStorage(tmp_path)}) == 1
    assert LocalStorage(tmp_path / "none").checkpoints() == []


def test_a_removal_that_is_cut_short_leaves_nothing_to_load(tmp_path, monkeypatch):
    place = make(tmp_path / "checkpoint_1")
    with monkeypatch.context() as patch:
        patch.setattr(storage.shutil, "rmtree", lambda *args, **kwargs: None)
        place.remove()
    assert place.state().kind == "absent" and place.parent().checkpoints() == []
    write(LocalStorage(tmp_path / "checkpoint_2"), "half")
    assert len(place.parent().sweep()) == 2 and os.listdir(tmp_path) == []


def test_what_a_killed_publish_left_is_removed_as_a_whole(tmp_path, monkeypatch):
    place = make(tmp_path / "checkpoint_1")
    write(place, "new")
    with monkeypatch.context() as patch:
        kill_at(patch, 4, False)  # between the two renames
        with pytest.raises(Killed):
            place.publish()
    assert not os.path.exists(place.location) and content(place) == "new"
    place.remove()
    assert os.listdir(tmp_path) == []


def test_sweeping_completes_what_was_being_published(tmp_path, monkeypatch):
    place = make(tmp_path / "checkpoint_1")
    write(place, "new")
    with monkeypatch.context() as patch:
        kill_at(patch, 2, True)
        with pytest.raises(Killed):
            place.publish()
    place.parent().sweep()
    assert content(place) == "new" and os.listdir(tmp_path) == ["checkpoint_1"]


def test_links_and_urls(tmp_path):
    real = make(tmp_path / "real")
    os.symlink(tmp_path / "real", tmp_path / "link")
    assert storage_of(tmp_path / "link") == real == storage_of(f"file://{tmp_path}/real")
    assert storage_of("~/x").location == os.path.realpath(os.path.expanduser("~/x"))
