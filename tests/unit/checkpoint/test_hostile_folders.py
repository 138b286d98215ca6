"""Names that no run of ours created: links, pipes, loops and garbage next to checkpoints. None is followed, waited for, or stops a load."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

import checkpoint_samples as samples
from accelerate import Accelerator
from accelerate.checkpoint import manifest
from accelerate.checkpoint.storage import LocalStorage
from accelerate.commands.accelerate_cli import main
from accelerate.runtime import durable
from accelerate.utils import ProjectConfiguration
from cases import cases

pytestmark = pytest.mark.skipif(os.name == "nt", reason="makes links and pipes")


@pytest.fixture(autouse=True)
def limit():
    """A reader that waits for a pipe would wait forever."""

    def late(*_):
        raise TimeoutError("waited for a pipe")

    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


def run_of(project, limit: int | None = 1) -> Accelerator:
    options = {"automatic_checkpoint_naming": True, "total_limit": limit}
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(str(project), **options))
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator


def plant(folder: Path, name: str, inner: str, target: Path, number: int) -> None:
    """Make a hidden folder of the save `name`, in which `inner` is a link."""
    aside = samples.left_behind(folder, name, number=number)
    if inner == ".accelerate_save":
        (aside / inner).rename(target / "place")
        (aside / ".former").mkdir()
        (aside / ".former" / "stolen.txt").touch()
        target = target / "place"
    (aside / (name if inner == "NAME" else inner)).symlink_to(target)


def tree(folder: Path) -> dict[str, str]:
    def kind(path):
        return "link" if path.is_symlink() else "file" if path.is_file() else "folder"

    return {path.relative_to(folder).as_posix(): kind(path) for path in folder.rglob("*")}


def inspection():
    """Return the module of the extension that lists checkpoints; a test without the extension is skipped."""
    return pytest.importorskip("accelerate.extensions.convert.inspect")


def prune_by_command(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["accelerate", "checkpoint", "prune", str(folder), "--keep", "1", "--yes"])
        main()


@pytest.mark.parametrize("inner", [".former", "NAME", ".removed", ".accelerate_save"])
@pytest.mark.parametrize("way", ["save_state", "async", "save_model", "prune", "sweep", "survey"])
def test_a_link_in_a_hidden_folder_is_not_followed(tmp_path, inner, way):
    outside, project = tmp_path / "outside", tmp_path / "project"
    checkpoints = project / "checkpoints"
    accelerator = run_of(project)
    for _ in range(2):
        accelerator.save_state()
    (outside / "sub").mkdir(parents=True)
    for name in ("a.txt", "sub/b.txt"):
        (outside / name).write_text("mine")
    for number, name in enumerate(("checkpoint_1", "checkpoint_2", "checkpoint_7", "weights", "gone")):
        plant(checkpoints, name, inner, outside, number)
    before, hidden = tree(outside), {name for name in tree(checkpoints) if ".saving" in name}
    if way in ("save_state", "async"):
        for _ in range(3):
            accelerator.save_state(blocking=way != "async")
        accelerator.wait_for_checkpoint()
    elif way == "save_model":
        accelerator.save_model(torch.nn.Linear(2, 2), checkpoints)
    elif way == "prune":
        accelerator.save_state()
        shutil.copytree(checkpoints / "checkpoint_2", checkpoints / "checkpoint_3")
        inspection()
        prune_by_command(project)
    elif way == "sweep":
        LocalStorage(checkpoints).sweep()
    else:
        inspection().survey(LocalStorage(project))
    assert tree(outside) == before and (outside / "sub" / "b.txt").read_text() == "mine"
    now = tree(checkpoints)
    assert {name for name in now if ".saving" in name} == hidden, "what is not ours stays"
    assert not [name for name, kind in now.items() if ".saving" not in name and (kind == "link" or "txt" in name)]
    accelerator.load_state(latest=True)


def test_a_visible_link_with_the_name_of_a_killed_save_is_not_followed(tmp_path, caplog):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    samples.left_behind(folder, "c", ".former")
    (folder / f".saving_{0:016x}" / ".former" / "note.txt").write_text("mine")
    samples.left_behind(outside, "target", ".former", 1)
    (outside / "target").mkdir()
    (folder / "c").symlink_to(outside / "target")
    (folder / "weights").symlink_to(outside / "target")
    before = tree(outside)
    LocalStorage(folder).sweep()
    Accelerator(cpu=True).save_model(torch.nn.Linear(2, 2), folder)
    assert tree(outside) == before and "note.txt" in " ".join(tree(folder)) and "is a link" in caplog.text


def test_a_lock_is_never_made_elsewhere(tmp_path):
    folder = tmp_path / "in" / "folder"
    folder.mkdir(parents=True)
    samples.left_behind(tmp_path / "in", "folder", ".removed")
    before = tree(tmp_path / "in")
    names = [f".lock_{name}" for name in (".", "..", "c", "pipe")]
    (folder / names[0]).touch(), (folder / names[1]).touch()
    (folder / names[2]).symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / names[3])
    LocalStorage(folder).sweep()
    assert {name for name in tree(tmp_path / "in") if not name.startswith("folder/")} == {*before}
    for name in ("c", "pipe"):
        with pytest.raises(OSError, match=rf"regular file.*Remove it.*\.lock_{name}"):
            Accelerator(cpu=True).save_state(folder / name)
    assert not (tmp_path / "elsewhere").exists() and os.path.lexists(folder / ".lock_pipe")


def hurt(checkpoints: Path, kind: str, monkeypatch) -> None:
    """Put something next to checkpoints that cannot be examined."""
    if kind == "loop":
        (checkpoints / "checkpoint_9").symlink_to("checkpoint_9")
        (checkpoints / "other").symlink_to("other")
        (checkpoints.parent / "latest").symlink_to("latest")
    elif kind == "below a file":
        (checkpoints / "file").touch()
        (checkpoints / "checkpoint_9").symlink_to("file/x")
    elif kind == "not permitted":
        barred = [checkpoints / "checkpoint_9", checkpoints / "private", checkpoints.parent / "private"]
        for folder in barred:
            folder.mkdir()
        for function in ("listdir", "scandir"):
            real = getattr(os, function)

            def refuses(path=".", real=real):
                if Path(path) in barred:
                    raise PermissionError(13, "Permission denied", str(path))
                return real(path)

            monkeypatch.setattr(os, function, refuses)
    else:
        for number, place in enumerate((b"\0", b"a\0b", b"x" * 10_000, b"x" * 256, b"\xff/..", b".former", b"\n")):
            aside = samples.left_behind(checkpoints, "", ".former", number)
            (aside.parent / ".accelerate_save").write_bytes(place)
        aside = samples.left_behind(checkpoints, "", ".former", 99)
        (aside.parent / ".accelerate_save").unlink()
        os.mkfifo(aside.parent / ".accelerate_save")


@pytest.mark.parametrize("kind", ["loop", "below a file", "not permitted", "garbage"])
def test_an_entry_that_cannot_be_examined_holds_up_nothing(tmp_path, monkeypatch, kind):
    project = tmp_path / "project"
    accelerator = run_of(project, limit=None)
    for _ in range(3):
        accelerator.save_state()
    hurt(project / "checkpoints", kind, monkeypatch)
    assert accelerator.load_state(latest=True).name == "checkpoint_2"
    found = {one.name: one.state.kind for one in inspection().survey(LocalStorage(project))}
    complete = {f"checkpoints/checkpoint_{number}" for number in range(3)}
    assert {name for name, kind in found.items() if kind == "complete"} == complete
    prune_by_command(project)
    accelerator.project_configuration.total_limit = 1
    accelerator.save_state()
    assert not (project / "checkpoints" / "checkpoint_0").exists()


def test_a_folder_of_checkpoints_that_cannot_be_read_is_listed_as_such(tmp_path, monkeypatch):
    accelerator = run_of(tmp_path)
    accelerator.save_state()
    shutil.copytree(tmp_path / "checkpoints" / "checkpoint_0", tmp_path / "checkpoint_0")
    real = os.scandir
    barred = tmp_path / "checkpoints"

    def refuses(path="."):
        if Path(path) == barred:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuses)
    found = {one.name: (one.state.kind, one.state.reason) for one in inspection().survey(LocalStorage(tmp_path))}
    unreadable = ("incomplete", "it cannot be read: Permission denied")
    assert found == {"checkpoint_0": ("complete", ""), "checkpoints": unreadable}
    assert not inspection().plan_pruning(LocalStorage(tmp_path), 1).old
    with pytest.raises(OSError, match="Permission denied"):  # which is no reason to begin again
        accelerator.load_state(latest=True, missing_ok=True)


@cases(
    "name, number",
    ("checkpoint_0", 0),
    ("checkpoint_10", 10),
    ("checkpoint_\u0663", None),
    ("checkpoint_\u0967\u0968", None),
    ("checkpoint_007", None),
    ("checkpoint_00", None),
    ("checkpoint_+7", None),
    ("checkpoint_1_0", None),
    ("checkpoint_", None),
    ("checkpoint_-1", None),
    ("checkpoint_3_old", None),
    ("best_checkpoint_3", None),
)
def test_only_numbers_that_we_write_count(name, number):
    assert manifest.number_of(name) == number
    assert manifest.is_checkpoint_file(name.replace("checkpoint", "optimizer") + ".bin") == (number is not None)


def test_a_manifest_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / manifest.NAME)
    with pytest.raises(manifest.DamagedCheckpoint, match="is no file"):
        manifest.Manifest.read(tmp_path)


def test_a_pipe_that_a_hook_leaves_in_a_checkpoint_is_refused(tmp_path):
    accelerator = run_of(tmp_path)
    accelerator.register_save_state_pre_hook(lambda *given: os.mkfifo(Path(given[-1]) / "pipe"))
    with pytest.raises(OSError, match=r"named pipe.*pipe"):
        accelerator.save_state()


def test_links_of_the_user_as_the_target_still_work(tmp_path):
    """The project's folder, `checkpoints`, and a checkpoint may be links to another disk."""
    disk, project = tmp_path / "disk", tmp_path / "project"
    (disk / "checkpoints").mkdir(parents=True), (disk / "one").mkdir()
    project.mkdir()
    for name in ("checkpoints", "one"):
        (project / name).symlink_to(disk / name)
    (tmp_path / "linked").symlink_to(project)
    accelerator = run_of(tmp_path / "linked", limit=2)
    for _ in range(3):
        accelerator.save_state()
    assert sorted(os.listdir(disk / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
    assert accelerator.load_state(latest=True) == disk / "checkpoints" / "checkpoint_2"
    prune_by_command(project / "checkpoints")
    assert os.listdir(disk / "checkpoints") == ["checkpoint_2"]
    accelerator.project_configuration.automatic_checkpoint_naming = False
    for _ in range(2):
        accelerator.save_state(project / "one")
    accelerator.load_state(project / "one")
    assert (project / "one").is_symlink() and manifest.NAME in os.listdir(disk / "one")


def test_a_temporary_file_is_not_written_through_a_link(tmp_path):
    with durable.written_whole(tmp_path / "file") as temporary:
        Path(temporary).write_text("old")
    Path(temporary).symlink_to(tmp_path / "victim")
    with durable.written_whole(tmp_path / "file") as temporary:
        Path(temporary).write_text("new")
    assert (tmp_path / "file").read_text() == "new" and not (tmp_path / "victim").exists()
