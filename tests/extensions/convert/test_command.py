"""The command that looks after checkpoints: what it prints, what it answers, and what it leaves alone."""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

import checkpoint_samples as samples
from accelerate import Accelerator
from accelerate.checkpoint.manifest import INCOMPLETE_MARKER, NAME, DamagedCheckpoint
from accelerate.checkpoint.storage import LocalStorage, storage_of
from cases import cases


def run(accelerate, *words, status=0):
    """Run the command, require the status, and return what it prints; what is refused has one line on stderr."""
    got, out, err = accelerate("checkpoint", *map(str, words))
    assert got == status, err
    assert (status != 0 or not err) and "Traceback" not in err
    return out + err


def numbered(folder, count=3):
    """Write complete checkpoints, a second apart."""
    for number in range(count):
        samples.write(folder / f"checkpoint_{number}", age=1000 - number)


def rows(text):
    return [line.split() for line in text.splitlines() if line]


@pytest.fixture
def project(tmp_path):
    """Four complete checkpoints and one that is not, saved an hour apart."""
    folder = tmp_path / "project"
    for number in range(4):
        facts = {"step": number, "iteration": number, "world_size": 2, "strategy": "ddp", "mesh": {"dp": 2}}
        samples.write(folder / "checkpoints" / f"checkpoint_{number}", age=3600 * (5 - number), **facts)
    broken = samples.write(folder / "checkpoints" / "checkpoint_4")
    (broken / "optimizer.bin").unlink()
    samples.touch(broken, 3600)
    return folder


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_ls(accelerate, project, tmp_path):
    folder = project / "checkpoints"
    samples.foreign(folder / "epoch_1", age=60)
    left = samples.left_behind(folder, "checkpoint_5")
    (left / "model.safetensors").write_bytes(bytes(2_000_000))
    out = run(accelerate, "ls", project)
    header, *lines = rows(out)
    assert header == ["NAME", "STEP", "ITERATION", "SIZE", "AGE", "RANKS", "STRATEGY", "STATE"]
    size, age = lines[1][3], lines[1][5]
    assert lines[1] == ["checkpoints/checkpoint_1", "1", "1", size, "KB", age, "2", "ddp", "complete"]
    assert re.fullmatch("4:00:0.", age)  # a slow machine takes a second
    assert lines[4][0] == "checkpoints/checkpoint_4" and "incomplete: optimizer.bin is missing" in out
    assert (lines[5][0], lines[5][1], lines[5][-1]) == ("checkpoints/epoch_1", "-", "foreign")
    assert f"{left} (2 MB)" in out and len(lines) == 7
    found = json.loads(run(accelerate, "ls", folder, "--json"))
    assert [one["name"] for one in found] == [*(f"checkpoint_{number}" for number in range(5)), "epoch_1"]
    facts = {"state": "complete", "number": 2, "step": 2, "world_size": 2, "strategy": "ddp"}
    assert facts.items() <= found[2].items() and found[4]["state"] == "incomplete"
    (project / "empty").mkdir()
    assert run(accelerate, "ls", project / "empty") == f"There is no checkpoint in {project / 'empty'}.\n"
    err = run(accelerate, "ls", tmp_path / "nowhere", status=2)
    assert err == f"accelerate checkpoint: error: {str(tmp_path / 'nowhere')!r}: there is no such folder.\n"


def test_verify(accelerate, project, tmp_path):
    folder = project / "checkpoints" / "checkpoint_1"
    assert run(accelerate, "verify", folder).startswith("checkpoint_1: whole (2 files, ")
    samples.flip(folder / "model.safetensors")
    out = run(accelerate, "verify", folder, status=1)
    assert "checkpoint_1: 1 problem\n  model.safetensors has changed" in out
    samples.foreign(project / "epoch_1")
    out = run(accelerate, "verify", project, status=1)
    assert "  model.safetensors has changed" in out
    assert "  optimizer.bin is missing" in out
    assert "epoch_1 has no manifest; nothing to verify by. It has:\n  " in out
    assert [line.split()[0] for line in out.splitlines()[-3:-1]] == ["model.safetensors", "optimizer.bin"]
    assert "3 of 6 checkpoints are complete." in out
    for nothing in (tmp_path, tmp_path / "nowhere"):
        assert len(run(accelerate, "verify", nothing, status=2).splitlines()) == 1


@pytest.fixture
def sharded(tmp_path):
    """A sharded checkpoint of another library, with one file of two pieces."""
    from torch.distributed.checkpoint import FileSystemWriter, save

    state = {"model": {"a": torch.arange(200.0), "b": torch.ones(3, 5)}}
    folder = tmp_path / "epoch_1"
    save(state, storage_writer=FileSystemWriter(folder / "pytorch_model_fsdp_0"), no_dist=True)
    return folder


def test_info(accelerate, tmp_path):
    facts = {"aliases": {"head.weight": "embed.weight"}, "world_size": 2, "mesh": {"dp": 2}, "age": 7200}
    folder = samples.write(tmp_path / "checkpoint_0", **facts)
    out = run(accelerate, "info", folder)
    facts = {line.split()[0]: line.split(None, 1)[1] for line in out.splitlines()[:8] if line}
    assert facts["Saved"].endswith("UTC, 2:00:00 ago") and "torch " in facts["Versions"]
    wanted = {"State": "complete", "Tensors": "5 with 66 numbers (40 F32, 25 BF16, 1 I64)"}
    assert {**wanted, "Ranks": "2 (single, mesh dp=2)"}.items() <= facts.items()
    lines = rows(out)
    files = [line[0] for line in lines if line[0].endswith((".bin", ".safetensors"))]
    assert files == ["model.safetensors", "optimizer.bin"]
    assert ["head.weight", "embed.weight", "model.safetensors"] in lines


def test_info_of_others(accelerate, project):
    folder = project / "checkpoints" / "checkpoint_3"
    found = json.loads(run(accelerate, "info", folder, "--json", "--tensors"))
    assert found["files"]["optimizer.bin"]["size"] == (folder / "optimizer.bin").stat().st_size
    assert found["tensors"]["list"]["model.safetensors"]["steps"] == {"shape": [], "dtype": "I64"}
    assert "checkpoints/checkpoint_0" in run(accelerate, "info", project, status=2)
    assert "incomplete: optimizer.bin is missing" in run(accelerate, "info", folder.with_name("checkpoint_4"))
    assert "5 with 66 numbers" in run(accelerate, "info", samples.foreign(project / "epoch_1"))


def test_info_of_shards(accelerate, sharded):
    out = run(accelerate, "info", sharded, "--tensors")
    assert "2 with 215 numbers (215 F32)" in out
    assert ["b", "3x5", "F32", "pytorch_model_fsdp_0/.metadata"] in rows(out)
    (sharded / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"nonsense")
    run(accelerate, "info", sharded)


def test_reshard(accelerate, sharded, tmp_path):
    words = ("reshard", str(sharded), "two", "--layout", "sharded", "--shards", "2")
    assert run(accelerate, *words) == "two: sharded, 2 shards\n"
    assert len(list((tmp_path / "two").rglob("*.distcp"))) == 2
    assert run(accelerate, "reshard", "two", "one", "--layout", "full") == "one: full\n"
    assert (tmp_path / "one" / "model.safetensors").exists()
    for line in ("one --layout full", "x --layout full --shards 2", "x --layout sharded --shards 0", "x"):
        run(accelerate, "reshard", sharded, *line.split(), status=2)
    assert not (tmp_path / "x").exists()


def test_what_cannot_be_converted_is_one_line(accelerate, tmp_path, monkeypatch):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"a": Hostile()}, tmp_path / "pytorch_model.bin")
    for command in (["export"], ["reshard", "--layout", "full"]):
        assert "and is not run." in run(accelerate, *command, tmp_path, tmp_path / "out", status=2)
    assert not (tmp_path / "ran").exists()
    monkeypatch.setattr("accelerate.extensions.convert.convert.reshard", Mock(side_effect=RuntimeError("a\nb")))
    assert len(run(accelerate, "reshard", tmp_path, tmp_path / "out", "--layout", "full", status=2).splitlines()) == 1


def left_in(project):
    return sorted(os.listdir(project / "checkpoints"))


def prune(accelerate, folder, keep, *words, status=0):
    return run(accelerate, "prune", folder, "--keep", keep, "--yes", *words, status=status)


def test_prune(accelerate, project):
    """Each folder for itself: one of a former run, in the project itself, stays."""
    samples.write(project / "checkpoints" / "best", age=99_999)
    samples.write(project / "checkpoint_9", age=100_060)
    assert [row[0] for row in rows(run(accelerate, "ls", project))[1:3]] == ["checkpoint_9", "checkpoints/best"]
    out = prune(accelerate, project, 2)
    assert left_in(project) == ["best", "checkpoint_2", "checkpoint_3", "checkpoint_4"]
    assert [row[0] for row in rows(out)[:2]] == ["checkpoints/checkpoint_0", "checkpoints/checkpoint_1"]
    assert "--incomplete removes it, too" in out and out.endswith("2 removed.\n")
    assert (project / "checkpoint_9").exists()


def test_prune_that_removes_nothing(accelerate, project):
    before = left_in(project)
    assert "3 would be removed (" in run(accelerate, "prune", project, "--keep", "1", "--dry-run")
    assert "There is nothing to remove." in prune(accelerate, project, "4")
    prune(accelerate, project, "0", status=2)
    run(accelerate, "prune", project, status=2)
    prune(accelerate, project / "checkpoints" / "checkpoint_0", 1, status=2)
    assert left_in(project) == before


def test_prune_asks(accelerate, project, monkeypatch):
    def answered(stdin, status=0):
        monkeypatch.setattr(sys, "stdin", stdin)
        return run(accelerate, "prune", project, "--keep", "1", status=status)

    before = left_in(project)
    assert "--yes" in answered(io.StringIO("y\n"), status=2)
    for answer in ("n\n", "", "\n", "what\n"):
        assert "Nothing was removed." in answered(Terminal(answer))
    assert left_in(project) == before
    assert "[y/N]" in answered(Terminal("y\n"))
    assert left_in(project) == ["checkpoint_3", "checkpoint_4"]


def test_prune_looks_again_after_asking(accelerate, tmp_path, monkeypatch):
    numbered(tmp_path)

    class Answer(Terminal):
        def readline(self):
            samples.write(tmp_path / "checkpoint_0", age=5)  # a run continues there
            return "y\n"

    monkeypatch.setattr(sys, "stdin", Answer())
    assert "has changed since the question" in run(accelerate, "prune", tmp_path, "--keep", "1", status=2)
    assert len(os.listdir(tmp_path)) == 3


def test_prune_incomplete(accelerate, project):
    folder = project / "checkpoints"
    for number, (name, inner) in enumerate([("checkpoint_7", "checkpoint_7"), ("checkpoint_1", ".removed")]):
        (samples.left_behind(folder, name, inner, number) / "model.safetensors").write_bytes(b"part")
    out = prune(accelerate, project, 4, "--incomplete", status=2)  # a run may be writing there right now
    assert "a run may be saving" in out and str(folder / ".saving_0") in out
    samples.touch(folder, 700)
    prune(accelerate, project, 4)
    assert len(left_in(project)) == 7
    assert prune(accelerate, project, 4, "--incomplete").endswith("3 removed.\n")
    assert left_in(project) == ["checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_3"]
    (folder / "checkpoint_5").mkdir()
    assert "checkpoint_5 was written to" in prune(accelerate, project, 1, "--incomplete", status=2)
    assert len(left_in(project)) == 5


def test_prune_follows_no_link(accelerate, tmp_path):
    run_folder, archive = tmp_path / "run", tmp_path / "archive"
    numbered(run_folder)
    numbered(archive, 2)
    links = {"latest": "checkpoint_2", "first": "checkpoint_0", "loop": run_folder}
    links |= {"best": archive / "checkpoint_1", "checkpoint_9": archive / "checkpoint_0"}
    for name, target in links.items():
        os.symlink(target, run_folder / name)
    assert [row[0] for row in rows(run(accelerate, "ls", run_folder))[1:]] == [f"checkpoint_{n}" for n in range(3)]
    assert prune(accelerate, run_folder, 2).endswith("\n1 removed.\n")
    assert (run_folder / "latest" / NAME).exists()
    assert sorted(path.name for path in archive.iterdir()) == ["checkpoint_0", "checkpoint_1"]
    assert set(os.listdir(run_folder)) == {"checkpoint_1", "checkpoint_2", *links}


def test_prune_stays_in_the_folder(accelerate, tmp_path):
    disk, project = tmp_path / "disk", tmp_path / "project"
    numbered(disk)
    samples.left_behind(disk, "checkpoint_7")
    samples.touch(disk, 700)
    project.mkdir()
    os.symlink(disk, project / "checkpoints")
    assert "checkpoints/checkpoint_1" in run(accelerate, "ls", project)
    assert f"to prune there, name {disk}." in prune(accelerate, project, 1, "--incomplete")
    assert len(os.listdir(disk)) == 4
    prune(accelerate, disk, 1, "--incomplete")
    assert os.listdir(disk) == ["checkpoint_2"]


@pytest.mark.parametrize("how", ["--foreign", "--incomplete"])
def test_prune_never_removes_the_folder_itself(accelerate, tmp_path, how):
    """The folder of a run may be called as a checkpoint is, and have weights in it."""
    folder = samples.foreign(tmp_path / "checkpoint_0")
    if how == "--incomplete":
        (folder / INCOMPLETE_MARKER).touch()
    numbered(folder / "checkpoints")
    samples.touch(folder, 9999)
    prune(accelerate, folder, 2, how)
    assert left_in(folder) == ["checkpoint_1", "checkpoint_2"]
    assert (folder / "model.safetensors").exists()


def test_prune_leaves_what_cannot_be_read_here(accelerate, tmp_path):
    numbered(tmp_path, 4)
    newer, broken, pipe = (tmp_path / f"checkpoint_{number}" / NAME for number in range(3))
    newer.write_text(json.dumps({**json.loads(newer.read_text()), "format": 99}))
    broken.write_text("{")
    pipe.unlink()
    os.mkfifo(pipe)
    (tmp_path / "checkpoint_4").mkdir()
    samples.touch(tmp_path, 9999)
    out = prune(accelerate, tmp_path, 1, "--incomplete")
    assert all(f"checkpoint_{number} stays" in out for number in range(3))
    assert sorted(os.listdir(tmp_path)) == [f"checkpoint_{number}" for number in range(4)]


def test_prune_puts_back_the_only_copy(accelerate, tmp_path):
    numbered(tmp_path)
    only = samples.left_behind(tmp_path, "checkpoint_2", number=2)
    os.rename(tmp_path / "checkpoint_2", only / ".former")
    samples.write(samples.left_behind(tmp_path, "checkpoint_1", ".former", 1))
    samples.touch(tmp_path, 5000)
    assert "\n2 would be removed (" in prune(accelerate, tmp_path, 2, "--incomplete", "--dry_run")
    out = prune(accelerate, tmp_path, 2, "--incomplete")
    assert out.endswith("\n2 removed.\n")
    assert str(only) not in out  # it is read from there until it has its name back
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_1", "checkpoint_2"]


def test_prune_says_what_it_could_not_remove(accelerate, project, monkeypatch):
    monkeypatch.setattr(LocalStorage, "remove", Mock(side_effect=PermissionError(13, "Permission denied")))
    out = prune(accelerate, project, 3, status=1)
    assert "checkpoint_0 could not be removed" in out and "0 removed.\n" in out


@pytest.fixture
def store():
    """A bucket with three checkpoints, the first of which lost a file."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    url = "memory://bucket/run"
    for number in range(3):
        place = storage_of(f"{url}/checkpoint_{number}")
        samples.write(Path(place.stage()), age=100 - number, step=number)
        place.publish()
    memory.rm(next(path for path in memory.find("/bucket/run/checkpoint_0") if path.endswith("optimizer.bin")))
    yield url
    memory.rm("/bucket", recursive=True)


def test_object_store(accelerate, store, tmp_path, monkeypatch):
    out = run(accelerate, "ls", store)
    assert [row[:2] for row in rows(out)[2:]] == [["checkpoint_1", "1"], ["checkpoint_2", "2"]]
    assert "incomplete: optimizer.bin is missing" in out
    assert "2 of 3 checkpoints are complete." in run(accelerate, "verify", store, status=1)
    assert "5 with 66 numbers" in run(accelerate, "info", f"{store}/checkpoint_2")
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    assert "5 tensors in 1 file" in run(accelerate, "export", f"{store}/checkpoint_2", tmp_path / "out")
    assert os.listdir(copies) == [], "what was fetched is removed at once, not when the process ends"
    prune(accelerate, store, 1)
    found = json.loads(run(accelerate, "ls", store, "--json"))
    assert [one["name"] for one in found] == ["checkpoint_0", "checkpoint_2"]
    for url in ("memory://bucket/nowhere", "nonsense://bucket/nowhere"):
        run(accelerate, "ls", url, status=2)


def test_checkpoints_of_a_run(accelerate, tmp_path):
    from accelerate.utils import ProjectConfiguration

    made = Accelerator(cpu=True, project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    made.prepare(model)
    for _ in range(2):
        made.save_state()
    run(accelerate, "verify", tmp_path)
    folder = tmp_path / "checkpoints" / "checkpoint_1"
    assert ["1.weight", "0.weight", "model.safetensors"] in rows(run(accelerate, "info", folder))
    assert "3 tensors in 1 file" in run(accelerate, "export", folder, tmp_path / "out")
    words = ("export", folder, tmp_path / "out", "--dtype", "bf16", "--max-shard-size", "24")
    assert "--overwrite" in run(accelerate, *words, status=2)
    (tmp_path / "out" / "config.json").write_text("{}")
    assert "3 tensors in 3 files" in run(accelerate, *words, "--overwrite")
    assert (tmp_path / "out" / "config.json").exists() and not (tmp_path / "out" / "model.safetensors").exists()
    prune(accelerate, tmp_path, 1)
    assert left_in(tmp_path) == ["checkpoint_1"]


@pytest.mark.cold
def test_only_an_export_loads_torch(project):
    program = """
import sys
from accelerate.commands.accelerate_cli import main
for line in ["ls .", "info checkpoint_0", "verify .", "prune . --keep 1 --yes"]:
    sys.argv = ["accelerate", "checkpoint", *line.split()]
    try:
        main()
    except SystemExit as end:
        assert end.code == 1
assert not {"torch", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=project / "checkpoints", timeout=120)
    assert left_in(project) == ["checkpoint_3", "checkpoint_4"]


def test_accept_lets_changed_files_load(accelerate, tmp_path):
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 2)
    accelerator.prepare(model)
    folder = accelerator.save_state(tmp_path / "c")
    save_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "scheduler_3.bin").write_bytes(b"half")
    with pytest.raises(DamagedCheckpoint, match=re.escape(f"accelerate checkpoint accept {folder}")):
        accelerator.load_state(folder)
    assert "scheduler_3.bin cannot be read" in run(accelerate, "accept", folder, status=2)
    run(accelerate, "verify", folder, status=1)
    (folder / "scheduler_3.bin").unlink(), (folder / "random_states_0.pkl").unlink(), (folder / "notes.txt").touch()
    printed = run(accelerate, "accept", folder)
    assert "model.safetensors has 152 bytes" in printed and "random_states_0.pkl is missing" in printed
    accelerator.load_state(folder)
    assert model.weight.eq(1).all() and "2x2" in run(accelerate, "info", folder, "--tensors")
    run(accelerate, "verify", folder)
    assert "Nothing has changed." in run(accelerate, "accept", folder) and os.listdir(tmp_path) == ["c"]
    (folder / "model.safetensors").write_bytes(b"short")
    run(accelerate, "accept", folder, status=2)
    assert "model.safetensors" in run(accelerate, "verify", folder, status=1)


@cases(
    "hurt, text",
    (
        lambda folder: (folder / NAME).write_text("{"),
        f"delete {NAME}, accelerate_manifest_parts and parameter_names.json",
    ),
    (lambda folder: (folder / f"{INCOMPLETE_MARKER}_1").touch(), "its save was interrupted"),
    (lambda folder: (folder / NAME).unlink(), "nothing to accept"),
    (lambda folder: folder.rename(folder.parent / "d"), "There is no checkpoint"),
)
def test_what_cannot_be_accepted_is_refused(accelerate, tmp_path, hurt, text):
    samples.write(tmp_path / "c")
    hurt(tmp_path / "c")
    assert text in run(accelerate, "accept", tmp_path / "c", status=2)
    assert "Copy the checkpoint" in run(accelerate, "accept", "memory://c", status=2)
