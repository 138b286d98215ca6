"""A checkpoint takes its location in one step, whatever happens in between; the user's own files stay, and one process writes."""

import errno
import itertools
import os
import time
import traceback
from pathlib import Path

import pytest

import checkpoint_samples as samples
from accelerate import Accelerator
from accelerate.checkpoint import manifest, storage
from accelerate.checkpoint.formats import describe
from accelerate.checkpoint.manifest import NAME, Manifest
from accelerate.checkpoint.storage import Busy, LocalStorage, prune, storage_of
from accelerate.utils import ProjectConfiguration
from cases import cases

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
    made.discard()
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


@pytest.mark.parametrize("able", [True, False])
def test_the_old_one_stays_until_the_new_one_is_there(tmp_path, monkeypatch, able):
    folder = tmp_path / "c"
    make(folder, files=("model.safetensors", "old_only.bin"))
    (folder / "logs").mkdir()
    put(folder, "sub/notes.txt", "sub/more.bin")
    os.chmod(folder, 0o2777)
    if not able:
        monkeypatch.setattr(storage, "exchange", lambda left, right: False)
    monkeypatch.chdir(tmp_path)
    made = write("c", "new")
    assert content(folder) == "old" and made.location == str(folder) and made.stored().size > 0
    monkeypatch.chdir(folder)  # which folders are used was decided before
    made.publish()
    assert content(folder) == "new"
    made.discard()
    assert content(folder) == "new" and os.listdir(tmp_path) == ["c"] and (folder / "logs").is_dir()
    assert os.stat(folder).st_mode & 0o777 == 0o777
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


def test_folders_of_the_user_that_are_called_like_hidden_ones_stay(tmp_path):
    """What a save has made is marked inside; a name alone means nothing."""
    mine = {f".{word}_c/notes.txt" for word in ("saving", "ready", "replaced", "removed")} | {".lock_c", ".lock_d"}
    put(tmp_path, *mine)
    for _ in range(3):
        make(tmp_path / "c")
        prune(LocalStorage(tmp_path), 1, keep=[])
    assert tree(tmp_path) == mine | {f"c/{name}" for name in (*FILES, NAME)}
    LocalStorage(tmp_path / "c").remove()
    assert tree(tmp_path) == mine and not LocalStorage(tmp_path).leftovers()


@pytest.mark.parametrize("place", ["", "..", "../other/c", "other/c"])
def test_a_hidden_folder_that_says_it_belongs_elsewhere_stays(tmp_path, place):
    make(tmp_path / "other" / "c")
    left = samples.left_behind(tmp_path / "in", place, ".former")
    put(left, "model.safetensors")
    (tmp_path / "in" / ".lock_").touch()
    LocalStorage(tmp_path / "in").sweep()
    assert (left / "model.safetensors").exists() and content(tmp_path / "other" / "c") == "old"


@pytest.mark.parametrize("length", [240, 246, 255])
def test_a_name_may_have_as_many_bytes_as_the_system_takes(tmp_path, length):
    accelerator, place = Accelerator(cpu=True), tmp_path / ("\u00e9" * (length // 2) + "x" * (length % 2))
    for _ in range(3):
        accelerator.save_state(place)
    accelerator.load_state(place)
    assert os.listdir(tmp_path) == [place.name]


@cases("name, error, text", (b"x" * 256, OSError, "name too long"), (b"caf\xe9", ValueError, "no UTF-8.*Rename"))
def test_a_name_that_cannot_be_read_again_is_refused_before_any_work(tmp_path, name, error, text):
    accelerator, called = Accelerator(cpu=True), []
    accelerator.register_save_state_pre_hook(lambda *given: called.append(given))
    with pytest.raises(error, match=text):
        accelerator.save_state(os.path.join(tmp_path, os.fsdecode(name)))
    assert os.listdir(tmp_path) == [] and not called


def test_a_second_writer_waits_and_is_refused_in_the_end(tmp_path, monkeypatch, caplog):
    first, second, slept = LocalStorage(tmp_path / "c"), LocalStorage(tmp_path / "c"), []
    folder = first.stage()
    first.parent().sweep()
    assert os.path.isdir(folder), "a save in progress is not swept away"
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(Busy, match=r"c' for 60 s: .*former one still running\? .*save_on_each_node"):
        second.stage()
    assert sum(slept) == pytest.approx(60) and caplog.text.count("waiting for it") == 1
    monkeypatch.setattr(time, "sleep", lambda seconds: first.discard())
    assert os.path.isdir(second.stage()) and not os.path.exists(folder)
    second.discard()
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
    in_format_1 = "generators_0.safetensors"
    for ours in (manifest.PARTS_FOLDER, manifest.PARAMETER_NAMES, in_format_1):
        (folder / ours).touch()
        assert made.state().kind == "incomplete" and "manifest" in made.state().reason
        (folder / ours).unlink()
    (tmp_path / "f").touch()
    assert LocalStorage(tmp_path / "f").state().kind == "absent"
    with pytest.raises(NotADirectoryError, match="is one"):
        LocalStorage(tmp_path / "f").stage()


def numbered(folder: Path, number: int, kind: str = "complete") -> str:
    """Make a checkpoint that is "complete", "marked", "truncated" or of "upstream", or a folder of the "user"; return its location."""
    made = folder / f"checkpoint_{number}"
    if kind in ("upstream", "user"):
        made.mkdir()
        (made / ("random_states_0.pkl" if kind == "upstream" else "notes.txt")).touch()
        return str(made)
    make(made)
    if kind == "truncated":
        (made / "model.safetensors").write_text("ol")
    elif kind == "marked":
        (made / f"{manifest.INCOMPLETE_MARKER}_1").touch()
    return str(made)


@cases(
    "kinds, limit, keep, left",
    (["complete"] * 3, None, [2], [0, 1, 2]),
    (["complete"] * 3, 2, [2], [1, 2]),
    (["complete"] * 4, 1, [0, 2], [0, 2]),  # the one just written, and the one that was loaded
    (["complete", "truncated", "marked", "complete"], 1, [3], [1, 2, 3]),  # only whole ones count and go
    (["upstream", "complete", "upstream", "complete"], 2, [3], [2, 3]),  # those of upstream, too, as there
    (["user", "user", "complete"], 1, [2], [0, 1, 2]),  # what is no checkpoint does neither
    (["upstream", "user", "complete", "complete"], 2, [3], [1, 2, 3]),
)
def test_the_oldest_go(tmp_path, kinds, limit, keep, left):
    paths = [numbered(tmp_path, number, kind) for number, kind in enumerate(kinds)]
    for number, inner in enumerate(("checkpoint_9", ".removed")):
        samples.left_behind(tmp_path, "checkpoint_9", inner, number)
    (tmp_path / ".users_owncheckpoint_9").mkdir()
    prune(LocalStorage(tmp_path), limit, keep=[*(paths[number] for number in keep), None])
    assert sorted(os.listdir(tmp_path)) == [".users_owncheckpoint_9", *(f"checkpoint_{number}" for number in left)]


@cases("remote, blocking", (False, True), (False, False), (True, True), (True, False))
def test_a_save_that_was_published_does_not_raise_where_pruning_fails(
    tmp_path, monkeypatch, request, caplog, remote, blocking
):
    if remote:
        request.getfixturevalue("memory")
    home = "memory://run" if remote else str(tmp_path)
    project = ProjectConfiguration(home, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    kind = type(storage_of(home))
    for name in ("sweep", "checkpoints"):
        accelerator.save_state()
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, lambda self: refuse())
            place = accelerator.save_state(blocking=blocking)
            accelerator.wait_for_checkpoint()
        assert storage_of(place).state().kind == "complete"
        assert caplog.text.count("Operation not supported") == 1 and f"{home}/checkpoints" in caplog.text
        left = [number for number, _ in storage_of(f"{home}/checkpoints").checkpoints()]
        # What could be done was done.
        assert left == ([1] if name == "sweep" else [2, 3])
        caplog.clear()


def test_a_left_over_lock_that_cannot_be_opened_holds_up_nothing(tmp_path, caplog):
    paths = [numbered(tmp_path, number) for number in (1, 2)]
    (tmp_path / ".lock_a").mkdir()
    samples.left_behind(tmp_path, "checkpoint_9", "checkpoint_9")
    prune(LocalStorage(tmp_path), 1, keep=[paths[1]])
    assert sorted(os.listdir(tmp_path)) == [".lock_a", "checkpoint_2"] and str(tmp_path) in caplog.text


def test_an_old_checkpoint_that_another_process_saves_to_stays(tmp_path, monkeypatch, caplog):
    paths = [numbered(tmp_path, number) for number in (1, 2)]
    held = LocalStorage(paths[0])
    held.stage()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    prune(LocalStorage(tmp_path), 1, keep=[paths[1]])
    assert content(paths[0]) == "old" and f"{paths[0]} could not be removed: Another process" in caplog.text


@pytest.mark.parametrize("able", [True, False])
@pytest.mark.parametrize("fails", ["scandir", "unlink", "rename"])
def test_a_publish_is_done_when_the_new_one_is_in_its_place(tmp_path, monkeypatch, caplog, fails, able):
    """It raised, and what was the user's own in the former one was removed with it."""
    folder, real = tmp_path / "c", getattr(os, fails)
    make(folder)
    put(folder, "notes.txt")
    made = write(folder, "new")

    def guarded(path, *args, **options):
        there = (folder / FILES[0]).exists() and (folder / FILES[0]).read_text() == "new"
        return refuse() if there else real(path, *args, **options)

    with monkeypatch.context() as patch:
        if not able:
            patch.setattr(storage, "exchange", lambda left, right: False)
        patch.setattr(os, fails, guarded)
        made.publish()
    assert content(folder) == "new"
    made.discard()
    make(folder, "newer")
    assert content(folder) == "newer" and (folder / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["c"]


def test_what_cannot_be_removed_is_reported_and_the_rest_goes(tmp_path, monkeypatch, caplog):
    paths, real = [numbered(tmp_path, number) for number in (1, 2, 3)], os.rename

    def rename(source, target):
        if source == paths[0]:
            raise PermissionError("not yours")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    prune(LocalStorage(tmp_path), 1, keep=[paths[2]])
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_1", "checkpoint_3"] and "not yours" in caplog.text


def test_a_publish_that_fails_between_two_renames_puts_the_former_one_back(tmp_path, monkeypatch):
    folder, real = tmp_path / "c", os.rename
    make(folder)
    put(folder, "notes.txt")
    made = write(folder, "new")
    monkeypatch.setattr(storage, "exchange", lambda left, right: False)

    def rename(source, target):
        return refuse() if source.endswith("/c") and target == str(folder) else real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="not supported"):
        made.publish()
    assert content(folder) == "new", "a reader takes what is complete, and newest"
    made.discard()
    assert content(folder) == "old" and (folder / "notes.txt").exists() and os.listdir(tmp_path) == ["c"]


def test_what_names_the_former_one_is_on_the_disk_before_it_leaves_its_place(tmp_path, monkeypatch):
    make(tmp_path / "c")
    synced, fsync, exchange = [], os.fsync, storage.exchange

    def record(descriptor):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def exchange_synced(left, right):
        assert ".accelerate_save" in synced
        return exchange(left, right)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(storage, "exchange", exchange_synced)
    make(tmp_path / "c", "new")
    assert content(tmp_path / "c") == "new"
