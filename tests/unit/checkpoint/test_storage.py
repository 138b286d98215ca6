"""A checkpoint takes its location in one step, whatever happens in between; the user's own files stay, and one process writes."""

import errno
import itertools
import os
import shutil
import stat
import time
import traceback
from pathlib import Path

import pytest

from accelerate import Accelerator
from accelerate.checkpoint import manifest, storage
from accelerate.checkpoint.formats import describe
from accelerate.checkpoint.manifest import NAME, Manifest
from accelerate.checkpoint.storage import Busy, LocalStorage, newest_first, prune, storage_of

FILES = ("model.safetensors", "sub/more.bin")
KILLED = 9


def put(folder, *files: str, text: str = "mine") -> None:
    for name in files:
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_text(text)


def write(folder, text: str, files: tuple[str, ...] = FILES) -> LocalStorage:
    made = LocalStorage(folder)
    staged = Path(made.stage())
    put(staged, *files, text=text)
    Manifest({name: describe(staged / name) for name in files}).write(staged)
    return made


def make(folder, text: str = "old", files: tuple[str, ...] = FILES) -> LocalStorage:
    made = write(folder, text, files)
    made.publish()
    return made


def content(folder) -> str:
    """The text of a whole checkpoint; fails for one that is not whole."""
    found = LocalStorage(folder)
    state = found.state()
    assert state.kind == "complete", state
    texts = {Path(found.fetch(), name).read_text() for name in state.manifest.files}
    assert len(texts) == 1, texts
    return texts.pop()


def tree(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}


def refuse(*args, **options):
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def killed(at: int, folder, text: str, able: bool = True) -> bool:
    """Save in a process that is killed before its n-th change of a file system that is able to exchange folders or not."""
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, KILLED)
        return status == KILLED
    steps = itertools.count(1)

    def counted(function):
        return lambda *args, **options: os._exit(KILLED) if next(steps) == at else function(*args, **options)

    try:
        for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
            setattr(os, name, counted(getattr(os, name)))
        storage.exchange = counted(storage.exchange if able else lambda left, right: False)
        make(folder, text)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def test_nothing_is_there_until_it_is_published(tmp_path, monkeypatch):
    made = write(tmp_path / "run" / "checkpoint_0", "new")
    assert made.state().kind == "absent" and made.parent().entries() == []
    made.publish()
    assert content(made.location) == "new" and made.stored().size > 6
    assert os.listdir(tmp_path / "run") == ["checkpoint_0"]
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    made.stage()
    made.abandon()
    assert content(made.location) == "new" and os.listdir(tmp_path / "run") == ["checkpoint_0"]


@pytest.mark.parametrize("able", [True, False])
def test_the_old_one_stays_until_the_new_one_is_there(tmp_path, monkeypatch, able):
    folder = tmp_path / "c"
    make(folder, files=("model.safetensors", "old_only.bin"))
    (folder / "logs").mkdir()
    put(folder, "sub/notes.txt", "sub/more.bin")
    if not able:
        monkeypatch.setattr(storage, "exchange", lambda left, right: False)
    monkeypatch.chdir(tmp_path)
    made = write("c", "new")
    assert content(folder) == "old" and made.location == str(folder) and made.stored().size > 0
    monkeypatch.chdir(folder)  # which folders are used was decided before
    made.publish()
    assert content(folder) == "new" and os.listdir(tmp_path) == ["c"] and (folder / "logs").is_dir()
    former = "sub/more.bin.former_1"  # of the user's own that has the name of a part
    assert tree(folder) == {*FILES, NAME, "sub/notes.txt", former}


@pytest.mark.parametrize("able", [True, False])
@pytest.mark.parametrize("first", ["complete", "foreign", "absent"])
def test_killed_at_any_step_a_whole_one_is_there(tmp_path, first, able):
    order = ["old", "new", "newer"]
    for at in itertools.count(1):
        folder = tmp_path / str(at) / "c"
        mine = set() if first == "absent" else {"notes.txt", "sub/notes.txt"}
        if first == "complete":
            make(folder, files=(*FILES, "a_hook's.json", "gone/z_hook's.json"))
        elif first == "foreign":
            put(folder, "model.safetensors", text="old")
        put(folder, *mine)
        least = 0
        # The next process is killed, too, while it completes what the first one left, or later.
        for text, step in (("new", at), ("newer", 1 + at * 7 % 19)):
            interrupted = killed(step, folder, text, able)
            kind = LocalStorage(folder).state().kind
            assert kind == "complete" or (kind == first and interrupted and least == 0), (at, step, kind)
            if kind == "complete":
                found = order.index(content(folder))
                assert (found == order.index(text)) if not interrupted else (found >= least), (at, step)
                least = found
            if text == "new":
                ended = not interrupted
        make(folder, "next")  # by a process that does not stand in it
        assert content(folder) == "next" and tree(folder) == {*FILES, NAME, *mine}, at
        assert os.listdir(tmp_path / str(at)) == ["c"] and not [*folder.glob(".*"), *folder.glob("gone")]
        if ended:
            break
    assert at > 8


def test_a_removal_that_is_cut_short_leaves_nothing_to_load(tmp_path, monkeypatch):
    made = make(tmp_path / "checkpoint_1")
    with monkeypatch.context() as patch:
        patch.setattr(storage.shutil, "rmtree", lambda *args, **options: None)
        made.remove()
    assert made.state().kind == "absent" and made.parent().checkpoints() == []
    shutil.copytree(tmp_path / ".removed_checkpoint_1", made.location)  # the user wants it back, and then does not
    made.remove()
    assert killed(6, tmp_path / "checkpoint_2", "half") and len(made.parent().leftovers()) == 1
    made.parent().sweep()
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        made.remove()


def test_what_a_killed_publish_left_is_completed_first(tmp_path):
    for at in itertools.count(1):
        made = make(tmp_path / "checkpoint_1")
        assert killed(at, made.location, "new", able=False)
        if not os.path.exists(made.location):  # between the two renames
            break
    assert content(made.location) == "new" and made.parent().checkpoints() == [(1, made)]
    made.parent().sweep()
    assert os.listdir(tmp_path) == ["checkpoint_1"]
    os.rename(made.location, tmp_path / ".replaced_checkpoint_1")  # the only copy
    assert made.parent().entries() == [made] and content(made.location) == "new"
    made.remove()
    assert os.listdir(tmp_path) == []


def test_what_is_the_users_own_stays(tmp_path):
    accelerator = Accelerator(cpu=True)

    def hook(models, weights, folder):
        put(folder, "tokenizer/vocab.json", "log_12:30.txt")  # a colon is no drive

    accelerator.register_save_state_pre_hook(hook)
    folder, mine = tmp_path / "c", ("optimizer/notes.txt", "tokenizer/notes.txt", "tokenizer/deep/more.txt")
    accelerator.save_state(folder)
    put(folder, *mine)
    os.chmod(folder, 0o2777)
    for _ in range(2):
        accelerator.save_state(folder)
        assert accelerator.load_state(folder)
    assert stat.S_IMODE(os.stat(folder).st_mode) & 0o777 == 0o777
    assert tree(folder) == {*LocalStorage(folder).state().manifest.files, NAME, *mine}


def test_what_a_link_in_a_checkpoint_leads_to_stays(tmp_path):
    make(tmp_path / "c")
    (tmp_path / "c" / "sub").rename(tmp_path / "elsewhere")
    (tmp_path / "c" / "sub").symlink_to(tmp_path / "elsewhere")
    make(tmp_path / "c", "new")
    assert content(tmp_path / "c") == "new" and (tmp_path / "elsewhere" / "more.bin").read_text() == "old"


def test_what_is_written_while_the_folder_is_exchanged_stays_too(tmp_path, monkeypatch, caplog):
    folder, real = tmp_path / "c", storage.exchange
    make(folder, files=("model.safetensors", "sub/more.bin", "gone/more.bin"))
    put(folder, "logs/a.txt", "logs/b.txt", "gone/mine.txt", text="before")

    def exchange(left, right):
        done = real(left, right)
        put(folder, "logs/a.txt", "gone", text="meanwhile")
        return done

    monkeypatch.setattr(storage, "exchange", exchange)
    make(folder, "new")
    found = {path.name: path.read_text() for path in (folder / "logs").iterdir()}
    assert found == {"a.txt": "meanwhile", "a.txt.former_1": "before", "b.txt": "before"}
    assert (folder / "gone.former_1" / "mine.txt").exists()
    assert "a.txt.former_1" in caplog.text and content(folder) == "new"


def test_a_name_that_no_system_shares_is_refused_before_the_old_one_goes(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(tmp_path / "c")
    accelerator.register_save_state_pre_hook(lambda *given: (Path(given[-1]) / "a\\b.txt").write_text("x"))
    with pytest.raises(ValueError, match="backslash"):
        accelerator.save_state(tmp_path / "c")
    assert accelerator.load_state(tmp_path / "c") and os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("reason", ["mount point", "cannot be written", "works in it"])
def test_a_folder_that_cannot_be_renamed_is_refused_and_stays(tmp_path, monkeypatch, reason):
    folder = tmp_path / "c"
    make(folder)
    if reason == "works in it":
        monkeypatch.chdir(folder)
    elif reason == "mount point":
        monkeypatch.setattr(os.path, "ismount", lambda path: path == str(folder))
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    accelerator = Accelerator(cpu=True)
    with pytest.raises(OSError, match=f"'{folder}' cannot be renamed: .*{reason}. Save into a folder inside it"):
        accelerator.save_state(folder)
    assert content(folder) == "old" and os.listdir(tmp_path) == ["c"]
    accelerator.save_state(folder / "inside")
    assert LocalStorage(folder / "inside").state().kind == "complete"


def test_a_second_writer_waits_and_is_refused_in_the_end(tmp_path, monkeypatch, caplog):
    first, second, slept = LocalStorage(tmp_path / "c"), LocalStorage(tmp_path / "c"), []
    folder = first.stage()
    first.parent().sweep()
    assert os.path.isdir(folder), "a save in progress is not swept away"
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(Busy, match=r"c' for 60 s: .*former one still running\? .*save_on_each_node"):
        second.stage()
    assert sum(slept) == pytest.approx(60) and caplog.text.count("waiting for it") == 1
    monkeypatch.setattr(time, "sleep", lambda seconds: first.abandon())
    assert second.stage() == folder and os.path.isdir(folder)
    second.abandon()
    (tmp_path / f"{manifest.LOCK_PREFIX}checkpoint_7").touch()
    second.parent().sweep()
    assert os.listdir(tmp_path) == [], "a lock that no process holds means nothing"


def test_a_fork_does_not_give_up_the_lock(tmp_path):
    held = LocalStorage(tmp_path / "c")
    held.stage()
    pid = os.fork()
    if pid == 0:
        del held
        os._exit(0)
    os.waitpid(pid, 0)
    LocalStorage(tmp_path).sweep()
    assert len(os.listdir(tmp_path)) == 2
    del held  # a save that is dropped ends like one that is killed
    LocalStorage(tmp_path).sweep()
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_refuses_none(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", refuse)
    LocalStorage(tmp_path / "c").stage()
    LocalStorage(tmp_path / "c").stage()


def test_a_lock_whose_file_the_former_holder_removes_is_none(tmp_path, monkeypatch):
    fcntl, path = pytest.importorskip("fcntl"), tmp_path / ".lock_c"
    real, held = fcntl.flock, LocalStorage(tmp_path / "c")
    monkeypatch.setattr(fcntl, "flock", lambda *given: (path.unlink(), real(*given)))
    monkeypatch.setattr(time, "sleep", lambda seconds: monkeypatch.setattr(fcntl, "flock", real))
    held.stage()
    LocalStorage(tmp_path).sweep()
    assert path.exists() and held.parent().leftovers()


def test_kinds_of_folders(tmp_path):
    made, folder = make(tmp_path / "c"), tmp_path / "c"
    (folder / "sub" / "more.bin").unlink()
    assert "sub/more.bin is missing" in made.state().reason
    (folder / NAME).write_text("{")
    assert made.state().kind == "incomplete" and not made.state().loads
    (folder / NAME).unlink()
    assert made.state().kind == "foreign" and made.state().loads
    (folder / manifest.generators_file(0)).touch()
    assert made.state().kind == "incomplete" and "manifest" in made.state().reason
    (tmp_path / "f").touch()
    assert LocalStorage(tmp_path / "f").state().kind == "absent"
    with pytest.raises(NotADirectoryError, match="is one"):
        LocalStorage(tmp_path / "f").stage()


def test_numbered_checkpoints_in_order(tmp_path):
    for name in ("checkpoint_10", "checkpoint_9", "checkpoint_2", "checkpoint_x", ".saving_checkpoint_3"):
        make(tmp_path / name)
    here = LocalStorage(tmp_path)
    assert [number for number, _ in here.checkpoints()] == [2, 9, 10]
    assert here.checkpoints()[-1][1] == here.child("checkpoint_10")
    assert here.child("checkpoint_2").parent() == here and len({here, LocalStorage(tmp_path)}) == 1
    assert here.files() == {} and set(LocalStorage(tmp_path / "checkpoint_2").files()) == {"model.safetensors", NAME}
    assert LocalStorage(tmp_path / "none").checkpoints() == []


def test_links_and_urls(tmp_path):
    real = make(tmp_path / "real")
    os.symlink(tmp_path / "real", tmp_path / "link")
    os.symlink(tmp_path / "real", tmp_path / "checkpoint_1")
    assert storage_of(tmp_path / "link") == real == storage_of(f"file://{tmp_path}/real")
    assert LocalStorage(tmp_path).entries() == [real]
    assert storage_of("~/x").location == os.path.realpath(os.path.expanduser("~/x"))


def numbered(folder: Path, number: int, kind: str = "complete") -> str:
    """Make a checkpoint that is "complete", "foreign", "marked", "truncated" or "empty"; return its location."""
    made = folder / f"checkpoint_{number}"
    make(made)
    if kind == "foreign":
        (made / NAME).unlink()
    elif kind == "truncated":
        (made / "model.safetensors").write_text("ol")
    elif kind == "marked":
        (made / f"{manifest.INCOMPLETE_MARKER}_1").touch()
    elif kind == "empty":
        shutil.rmtree(made)
        made.mkdir()
    return str(made)


def test_the_newest_come_first_and_what_is_not_whole_is_passed_over(tmp_path):
    for number, kind in enumerate(["complete", "foreign", "complete", "marked", "truncated", "empty"], start=8):
        numbered(tmp_path, number, kind)
    found, passed = newest_first(LocalStorage(tmp_path))
    assert [one.name for one in found] == ["checkpoint_10", "checkpoint_9", "checkpoint_8"]
    reasons = ("checkpoint_13: the folder is empty", "has 2 bytes, but 3 were written", "did not come to its end")
    assert all(reason in line for reason, line in zip(reasons, passed, strict=True)), passed
    alone, damaged = LocalStorage(tmp_path / "checkpoint_8"), LocalStorage(tmp_path / "checkpoint_12")
    assert newest_first(alone) == ([alone], []) and len(newest_first(damaged)[1]) == 1
    assert newest_first(LocalStorage(tmp_path / "missing")) == newest_first(LocalStorage(tmp_path / "checkpoint_13"))


@pytest.mark.parametrize(
    ("kinds", "limit", "keep", "left"),
    [
        (["complete"] * 3, None, [2], [0, 1, 2]),
        (["complete"] * 3, 2, [2], [1, 2]),
        (["complete"] * 4, 1, [0, 2], [0, 2]),  # the one just written, and the one that was loaded
        (["complete", "truncated", "marked", "complete"], 1, [3], [1, 2, 3]),  # only whole ones count and go
    ],
)
def test_the_oldest_go(tmp_path, kinds, limit, keep, left):
    paths = [numbered(tmp_path, number, kind) for number, kind in enumerate(kinds)]
    for prefix in (manifest.STAGING_PREFIX, manifest.REMOVED_PREFIX, ".users_own"):
        (tmp_path / f"{prefix}checkpoint_9").mkdir()
    prune(LocalStorage(tmp_path), limit, keep=[*(paths[number] for number in keep), None])
    assert sorted(os.listdir(tmp_path)) == [".users_owncheckpoint_9", *(f"checkpoint_{number}" for number in left)]


def test_what_cannot_be_removed_is_reported_and_the_rest_goes(tmp_path, monkeypatch, caplog):
    paths, real = [numbered(tmp_path, number) for number in (1, 2, 3)], os.rename

    def rename(source, target):
        if source == paths[0]:
            raise PermissionError("not yours")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    prune(LocalStorage(tmp_path), 1, keep=[paths[2]])
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_1", "checkpoint_3"] and "not yours" in caplog.text
