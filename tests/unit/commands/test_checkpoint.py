"""The command that looks after checkpoints: what it prints, what it answers, and what it leaves alone."""

import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import checkpoint_samples as samples
from accelerate.checkpoint.manifest import INCOMPLETE_MARKER, NAME, REMOVED_PREFIX, STAGING_PREFIX
from accelerate.checkpoint.storage import storage_of
from accelerate.commands import checkpoint as module
from accelerate.commands.utils import or_exit


def run(accelerate, *words):
    return accelerate("checkpoint", *map(str, words))


def rows(text):
    return [line.split() for line in text.splitlines() if line]


@pytest.fixture
def project(tmp_path):
    """Four complete checkpoints and one that is not, saved an hour apart."""
    folder = tmp_path / "project"
    for number in range(4):
        samples.write(
            folder / "checkpoints" / f"checkpoint_{number}",
            age=3600 * (5 - number),
            step=number,
            iteration=number,
            world_size=2,
            strategy="ddp",
            mesh={"dp": 2},
        )
    broken = samples.write(folder / "checkpoints" / "checkpoint_4")
    (broken / "optimizer.bin").unlink()
    samples.touch(broken, 3600)
    return folder


class Terminal(io.StringIO):
    def isatty(self):
        return True


# -- ls ----------------------------------------------------------------------------------------------------------------


def test_ls(accelerate, project):
    samples.foreign(project / "checkpoints" / "epoch_1", age=60)
    status, out, _ = run(accelerate, "ls", project)
    assert status == 0
    header, *lines = rows(out)
    assert header == ["NAME", "STEP", "ITERATION", "SIZE", "AGE", "RANKS", "STRATEGY", "STATE"]
    assert lines[1] == [
        *("checkpoints/checkpoint_1", "1", "1", lines[1][3], "KB", "4", "h", "2", "ddp", "complete"),
    ]
    assert lines[4][0] == "checkpoints/checkpoint_4"
    assert "incomplete: optimizer.bin is missing" in out
    assert (lines[5][0], lines[5][1], lines[5][-1]) == ("checkpoints/epoch_1", "-", "foreign")


def test_ls_json(accelerate, project):
    status, out, _ = run(accelerate, "ls", project / "checkpoints", "--json")
    told = json.loads(out)
    assert status == 0
    assert [one["name"] for one in told] == [f"checkpoint_{number}" for number in range(5)]
    assert {key: told[2][key] for key in ("state", "number", "step", "world_size", "strategy")} == {
        "state": "complete",
        "number": 2,
        "step": 2,
        "world_size": 2,
        "strategy": "ddp",
    }
    assert 3 * 3600 <= told[2]["age"] < 3 * 3600 + 60
    assert told[2]["size"] > 0
    assert told[4]["state"] == "incomplete"
    assert run(accelerate, "ls", project.parent, "--json")[1] == "[]\n"


def test_ls_of_one(accelerate, project):
    _, out, _ = run(accelerate, "ls", project / "checkpoints" / "checkpoint_3")
    assert [row[0] for row in rows(out)] == ["NAME", "checkpoint_3"]


def test_ls_of_nothing(accelerate, tmp_path):
    status, out, _ = run(accelerate, "ls", tmp_path)
    assert (status, out) == (0, f"There is no checkpoint in {tmp_path}.\n")
    status, _, err = run(accelerate, "ls", tmp_path / "nowhere")
    assert status == 2
    assert err == f"accelerate checkpoint: error: {str(tmp_path / 'nowhere')!r}: there is no such folder.\n"


def test_ls_tells_of_leftovers(accelerate, project):
    left = project / "checkpoints" / (STAGING_PREFIX + "checkpoint_5")
    left.mkdir()
    (left / "model.safetensors").write_bytes(bytes(2_000_000))
    samples.write(project / "checkpoints" / "checkpoint_5")
    _, out, _ = run(accelerate, "ls", project / "checkpoints")
    assert f"{left} (2 MB)" in out
    assert len(rows(out)) == 8


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_one(accelerate, project):
    folder = project / "checkpoints" / "checkpoint_1"
    status, out, err = run(accelerate, "verify", folder)
    assert (status, err) == (0, "")
    assert out.startswith("checkpoint_1: whole (3 files, ")
    samples.flip(folder / "model.safetensors")
    status, out, _ = run(accelerate, "verify", folder)
    assert status == 1
    assert "checkpoint_1: 1 problem\n  model.safetensors has changed" in out


def test_verify_all(accelerate, project):
    samples.foreign(project / "epoch_1")
    samples.flip(project / "checkpoints" / "checkpoint_2" / "generators_0.safetensors")
    status, out, _ = run(accelerate, "verify", project)
    assert status == 1
    assert "  generators_0.safetensors has changed" in out
    assert "  optimizer.bin is missing" in out
    assert "epoch_1: nothing wrong was found, but without a manifest" in out
    assert "4 of 6 checkpoints are whole." in out


def test_verify_nothing(accelerate, tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        status, _, err = run(accelerate, "verify", folder)
        assert status == 2
        assert len(err.splitlines()) == 1


def test_progress_bar_on_a_terminal(project, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with module.progress_bar() as begin:
        step = begin(2_000_000)
        step(2_000_000)
    assert "0.00/2.00M" in terminal.getvalue()


def test_verify_damaged_archives(accelerate, tmp_path):
    """A flipped bit may make a part of torch's format look encrypted, or compressed by some other method."""
    folder = samples.foreign(tmp_path / "epoch_1")
    data = (folder / "optimizer.bin").read_bytes()
    directory = data.rindex(b"PK\1\2")  # of its last part
    for position in (directory + 6, directory + 8, directory + 10, 0):
        (folder / "optimizer.bin").write_bytes(data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :])
        status, out, err = run(accelerate, "verify", folder)
        assert (status, err) == (1, ""), position
        assert "epoch_1: 1 problem\n  optimizer.bin " in out


@pytest.fixture
def sharded(tmp_path):
    """A sharded checkpoint of another library, with one file of two pieces."""
    import torch
    from torch.distributed.checkpoint import FileSystemWriter, save

    state = {"model": {"a": torch.arange(200.0), "b": torch.ones(3, 5)}}
    folder = tmp_path / "epoch_1"
    save(state, storage_writer=FileSystemWriter(folder / "pytorch_model_fsdp_0"), no_dist=True)
    return folder


def test_verify_foreign_shards(accelerate, sharded):
    assert run(accelerate, "verify", sharded)[0] == 0
    (shard,) = (sharded / "pytorch_model_fsdp_0").glob("*.distcp")
    samples.flip(shard, shard.read_bytes().index(struct.pack("200f", *range(200))))
    status, out, err = run(accelerate, "verify", sharded)
    assert (status, err) == (1, "")
    assert f"pytorch_model_fsdp_0/{shard.name} has changed" in out
    shard.unlink()
    status, out, _ = run(accelerate, "verify", sharded)
    assert status == 1
    assert f"{shard.name} is missing" in out


def test_verify_names_missing_shards_of_an_index(accelerate, tmp_path):
    folder = samples.foreign(tmp_path / "epoch_1")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    status, out, _ = run(accelerate, "verify", folder)
    assert status == 1
    assert "model.safetensors.index.json names model-00001-of-00001.safetensors, which is missing" in out


# -- info --------------------------------------------------------------------------------------------------------------


def test_info(accelerate, tmp_path):
    folder = samples.write(
        tmp_path / "checkpoint_0", aliases={"head.weight": "embed.weight"}, world_size=2, mesh={"dp": 2}, age=7200
    )
    status, out, _ = run(accelerate, "info", folder)
    assert status == 0
    facts = {line.split()[0]: line.split(None, 1)[1] for line in out.splitlines()[:8] if line}
    assert facts["State"] == "complete"
    assert facts["Saved"].endswith("UTC, 2 h ago")
    assert facts["Tensors"] == "5 with 66 numbers (40 F32, 25 BF16, 1 I64)"
    assert facts["Ranks"] == "2 (single, mesh dp=2)"
    assert "torch " in facts["Versions"]
    lines = rows(out)
    assert [line[0] for line in lines if line[0].endswith((".bin", ".safetensors"))] == [
        *("generators_0.safetensors", "model.safetensors", "optimizer.bin")
    ]
    assert ["head.weight", "embed.weight", "model.safetensors"] in lines
    assert "SHAPE" not in out
    _, out, _ = run(accelerate, "info", folder, "--tensors")
    assert ["layer.weight", "5x5", "BF16", "model.safetensors"] in rows(out)
    assert ["steps", "scalar", "I64", "model.safetensors"] in rows(out)


def test_info_json(accelerate, project):
    folder = project / "checkpoints" / "checkpoint_3"
    told = json.loads(run(accelerate, "info", folder, "--json", "--tensors")[1])
    assert told["files"]["optimizer.bin"]["size"] == (folder / "optimizer.bin").stat().st_size
    assert told["tensors"]["list"]["model.safetensors"]["steps"] == {"shape": [], "dtype": "I64"}
    assert "list" not in json.loads(run(accelerate, "info", folder, "--json")[1])["tensors"]


def test_info_of_others(accelerate, project):
    status, _, err = run(accelerate, "info", project)
    assert status == 2
    assert "checkpoints/checkpoint_0" in err
    status, out, _ = run(accelerate, "info", project / "checkpoints" / "checkpoint_4")
    assert status == 0
    assert "incomplete: optimizer.bin is missing" in out
    _, out, _ = run(accelerate, "info", samples.foreign(project / "epoch_1"))
    assert "5 with 66 numbers" in out


def test_info_of_shards(accelerate, sharded, tmp_path):
    from accelerate.checkpoint.convert import reshard

    reshard(str(sharded), str(tmp_path / "checkpoint_1"), "sharded", 2)
    for folder in (sharded, tmp_path / "checkpoint_1"):
        status, out, _ = run(accelerate, "info", folder, "--tensors")
        assert status == 0
        assert "2 with 215 numbers (215 F32)" in out
        assert ["b", "3x5", "F32", "pytorch_model_fsdp_0/.metadata"] in rows(out)
    (sharded / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"nonsense")
    assert run(accelerate, "info", sharded)[0] == 0


# -- export and reshard ------------------------------------------------------------------------------------------------


def test_export(accelerate, project, tmp_path):
    from safetensors.torch import load_file

    folder = project / "checkpoints" / "checkpoint_3"
    status, out, _ = run(accelerate, "export", folder, tmp_path / "out", "--dtype", "bf16")
    assert status == 0
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert out == f"{tmp_path / 'out'}: 5 tensors in 1 file ({size} B)\n"
    assert str(load_file(tmp_path / "out" / "model.safetensors")["embed.weight"].dtype) == "torch.bfloat16"
    status, _, err = run(accelerate, "export", folder, tmp_path / "out")
    assert status == 2
    assert "--overwrite" in err
    assert run(accelerate, "export", folder, tmp_path / "out", "--overwrite", "--max-shard-size", "60")[0] == 0
    assert len(list((tmp_path / "out").iterdir())) == 4


def test_export_of_what_is_damaged(accelerate, project, tmp_path):
    folder = project / "checkpoints" / "checkpoint_3"
    samples.flip(folder / "model.safetensors")
    status, _, err = run(accelerate, "export", folder, tmp_path / "out")
    assert status == 2
    assert err.startswith("accelerate checkpoint: error: The checkpoint")
    assert "model.safetensors has changed" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert run(accelerate, "export", folder, tmp_path / "out", "--max_shard_size", "many")[0] == 2
    assert run(accelerate, "export", folder, tmp_path / "out", "--model", "7")[0] == 2


def test_reshard(accelerate, project, tmp_path, monkeypatch):
    calls = []
    stand_in = type(sys)("accelerate.checkpoint.convert")
    stand_in.reshard = lambda *arguments: calls.append(arguments)
    monkeypatch.setitem(sys.modules, "accelerate.checkpoint.convert", stand_in)
    folder = str(project / "checkpoints" / "checkpoint_3")
    assert run(accelerate, "reshard", folder, "out", "--layout", "sharded", "--shards", "4")[0] == 0
    assert run(accelerate, "reshard", folder, "out", "--layout", "full")[0] == 0
    assert calls == [(folder, "out", "sharded", 4), (folder, "out", "full", 1)]
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    for words in (
        ["used", "--layout", "full"],
        ["out", "--layout", "full", "--shards", "2"],
        ["out", "--layout", "sharded", "--shards", "0"],
        ["out", "--layout", "other"],
        ["out"],
    ):
        assert run(accelerate, "reshard", folder, *words)[0] == 2
    assert len(calls) == 2


def test_what_cannot_be_converted_is_told_in_one_line(accelerate, tmp_path, monkeypatch):
    import torch

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    kinds = {
        "objects": ({"a": Hostile()}, "is not run: unsupported GLOBAL"),
        "complex": ({"a": torch.ones(2, dtype=torch.complex128)}, "'a'"),
        "sparse": ({"a": torch.ones(2, 3).to_sparse()}, ""),
    }
    for kind, (content, said) in kinds.items():
        (tmp_path / kind).mkdir()
        torch.save(content, tmp_path / kind / "pytorch_model.bin")
        for command in (["export"], ["reshard", "--layout", "full"]):
            status, _, err = run(accelerate, *command, tmp_path / kind, tmp_path / "out")
            lines = [line for line in err.splitlines() if line.startswith("accelerate checkpoint: error: ")]
            assert (status, len(lines)) == (2, 1), (kind, command, err)
            assert command == ["export"] or said in lines[0]
            assert "Traceback" not in err
    assert not (tmp_path / "ran").exists()
    for error in (IndexError("tuple index out of range"), RuntimeError("a\nb"), MemoryError(), OverflowError("long")):

        def fail(*arguments, error=error):
            raise error

        monkeypatch.setattr("accelerate.checkpoint.convert.reshard", fail)
        status, _, err = run(accelerate, "reshard", tmp_path / "sparse", tmp_path / "out", "--layout", "full")
        assert (status, len(err.splitlines())) == (2, 1), err


# -- prune -------------------------------------------------------------------------------------------------------------


def left_in(project):
    return sorted(path.name for path in (project / "checkpoints").iterdir())


def test_prune(accelerate, project):
    samples.write(project / "checkpoints" / "best", age=99_999)
    status, out, _ = run(accelerate, "prune", project, "--keep", "2", "--yes")
    assert status == 0
    assert left_in(project) == ["best", "checkpoint_2", "checkpoint_3", "checkpoint_4"]
    assert [row[0] for row in rows(out)[:2]] == ["checkpoints/checkpoint_0", "checkpoints/checkpoint_1"]
    assert "--incomplete removes it, too" in out
    assert out.endswith("2 removed.\n")


def test_prune_dry_run(accelerate, project):
    before = left_in(project)
    status, out, _ = run(accelerate, "prune", project, "--keep", "1", "--dry-run")
    assert status == 0
    assert "3 would be removed (" in out
    assert left_in(project) == before


def test_prune_keeps_enough(accelerate, project):
    before = left_in(project)
    for keep in ("4", "9"):
        status, out, _ = run(accelerate, "prune", project, "--keep", keep)
        assert status == 0
        assert "There is nothing to remove." in out
    for words in (["--keep", "0"], ["--keep", "-1"], []):
        assert run(accelerate, "prune", project, *words)[0] == 2
    assert run(accelerate, "prune", project / "checkpoints" / "checkpoint_0", "--keep", "1")[0] == 2
    assert left_in(project) == before


def test_prune_asks(accelerate, project, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    before = left_in(project)
    status, _, err = run(accelerate, "prune", project, "--keep", "1")
    assert status == 2
    assert "--yes" in err
    for answer in ("n\n", "", "\n", "what\n"):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert "Nothing was removed." in run(accelerate, "prune", project, "--keep", "1")[1]
    assert left_in(project) == before
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert "[y/N]" in run(accelerate, "prune", project, "--keep", "1")[1]
    assert left_in(project) == ["checkpoint_3", "checkpoint_4"]


def test_prune_incomplete(accelerate, project):
    folder = project / "checkpoints"
    for name in (STAGING_PREFIX + "checkpoint_7", REMOVED_PREFIX + "checkpoint_1"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(b"part")
    status, out, err = run(accelerate, "prune", project, "--keep", "4", "--incomplete", "--yes")
    assert status == 2  # a run may be writing there right now
    assert "a run may be saving" in err
    assert str(folder / ".saving_checkpoint_7") in out
    samples.touch(folder, 700)
    status, out, _ = run(accelerate, "prune", project, "--keep", "4", "--yes")
    assert status == 0
    assert len(left_in(project)) == 7
    status, out, _ = run(accelerate, "prune", project, "--keep", "4", "--incomplete", "--yes")
    assert status == 0
    assert left_in(project) == ["checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_3"]
    assert out.endswith("3 removed.\n")


def test_a_project_with_nothing_but_leftovers(accelerate, tmp_path):
    folder = tmp_path / "checkpoints" / (STAGING_PREFIX + "checkpoint_0")
    folder.mkdir(parents=True)
    samples.touch(tmp_path, 700)
    assert str(folder) in run(accelerate, "ls", tmp_path)[1]
    assert run(accelerate, "prune", tmp_path, "--keep", "1", "--incomplete", "--yes")[0] == 0
    assert left_in(tmp_path) == []


def test_prune_leaves_what_is_being_saved(accelerate, project):
    folder = project / "checkpoints" / "checkpoint_5"
    folder.mkdir()
    status, _, err = run(accelerate, "prune", project, "--keep", "1", "--incomplete", "--yes")
    assert status == 2
    assert "checkpoint_5 was written to" in err
    assert folder.exists()


def test_prune_foreign(accelerate, project):
    samples.foreign(project / "checkpoints" / "checkpoint_9")
    before = left_in(project)
    run(accelerate, "prune", project, "--keep", "4", "--yes")
    assert left_in(project) == before
    run(accelerate, "prune", project, "--keep", "4", "--yes", "--foreign")
    assert left_in(project) == before[1:]


def test_prune_follows_no_link(accelerate, tmp_path):
    run_folder, archive = tmp_path / "run", tmp_path / "archive"
    for number in range(3):
        samples.write(run_folder / f"checkpoint_{number}", age=100 - number)
    samples.write(archive / "checkpoint_1", age=500)
    samples.write(archive / "checkpoint_0", age=600)
    os.symlink("checkpoint_2", run_folder / "latest")
    os.symlink("checkpoint_0", run_folder / "first")
    os.symlink(archive / "checkpoint_1", run_folder / "best")
    os.symlink(archive / "checkpoint_0", run_folder / "checkpoint_9")
    os.symlink(run_folder, run_folder / "loop")
    assert [row[0] for row in rows(run(accelerate, "ls", run_folder)[1])[1:]] == [f"checkpoint_{n}" for n in range(3)]
    status, out, err = run(accelerate, "prune", run_folder, "--keep", "2", "--yes")
    assert (status, err) == (0, "")
    assert out.endswith("\n1 removed.\n")
    assert (run_folder / "latest" / NAME).exists()
    assert sorted(path.name for path in archive.iterdir()) == ["checkpoint_0", "checkpoint_1"]
    assert {"checkpoint_1", "checkpoint_2", "best", "checkpoint_9"} <= set(os.listdir(run_folder))
    assert not (run_folder / "checkpoint_0").exists()


def test_prune_stays_in_the_folder(accelerate, tmp_path):
    """A project may keep its checkpoints on another disk."""
    for number in range(3):
        samples.write(tmp_path / "disk" / f"checkpoint_{number}", age=100 - number)
    left = tmp_path / "disk" / ".saving_checkpoint_7"
    left.mkdir()
    samples.touch(tmp_path / "disk", 700)
    (tmp_path / "project").mkdir()
    os.symlink(tmp_path / "disk", tmp_path / "project" / "checkpoints")
    assert "checkpoints/checkpoint_1" in run(accelerate, "ls", tmp_path / "project")[1]
    status, out, _ = run(accelerate, "prune", tmp_path / "project", "--keep", "1", "--incomplete", "--yes")
    assert status == 0
    assert f"to prune there, name {tmp_path / 'disk'}." in out
    assert len(list((tmp_path / "disk").iterdir())) == 4
    assert run(accelerate, "prune", tmp_path / "disk", "--keep", "1", "--incomplete", "--yes")[0] == 0
    assert os.listdir(tmp_path / "disk") == ["checkpoint_2"]


@pytest.mark.parametrize("how", ["--foreign", "--incomplete"])
def test_prune_never_removes_the_folder_itself(accelerate, tmp_path, how):
    """The folder of a run may be called as a checkpoint is, and have weights in it."""
    folder = samples.foreign(tmp_path / "checkpoint_0")
    if how == "--incomplete":
        (folder / INCOMPLETE_MARKER).touch()
    for number in range(1, 4):
        samples.write(folder / "checkpoints" / f"checkpoint_{number}", age=100 - number)
    samples.touch(folder, 9999)
    assert run(accelerate, "prune", folder, "--keep", "2", how, "--yes")[0] == 0
    assert left_in(folder) == ["checkpoint_2", "checkpoint_3"]
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("how", ["newer", "forbidden", "broken", "pipe"])
def test_prune_leaves_what_cannot_be_read_here(accelerate, tmp_path, monkeypatch, how):
    for number in range(2):
        samples.write(tmp_path / f"checkpoint_{number}", age=100 - number)
    path = tmp_path / "checkpoint_0" / NAME
    if how == "newer":
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    elif how == "broken":
        path.write_text("{")
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        real = open

        def refuse(file, *arguments, **options):
            if os.fspath(file) == str(path):
                raise PermissionError(13, "Permission denied")
            return real(file, *arguments, **options)

        monkeypatch.setattr("builtins.open", refuse)
    samples.touch(tmp_path, 9999)
    (tmp_path / "checkpoint_2").mkdir()
    samples.touch(tmp_path / "checkpoint_2", 9999)
    status, out, _ = run(accelerate, "prune", tmp_path, "--keep", "1", "--incomplete", "--yes")
    assert status == 0
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_0", "checkpoint_1"]
    assert "checkpoint_0 stays" in out


def test_prune_takes_each_folder_for_itself(accelerate, tmp_path):
    samples.write(tmp_path / "checkpoint_9", age=99_999)  # of a former run
    for number in range(3):
        samples.write(tmp_path / "checkpoints" / f"checkpoint_{number}", age=100 - number)
    listed = [row[0] for row in rows(run(accelerate, "ls", tmp_path)[1])[1:]]
    assert listed == ["checkpoint_9", *(f"checkpoints/checkpoint_{number}" for number in range(3))]
    assert run(accelerate, "prune", tmp_path, "--keep", "1", "--yes")[0] == 0
    assert left_in(tmp_path) == ["checkpoint_2"]
    assert (tmp_path / "checkpoint_9").exists()


def test_prune_tells_what_it_does(accelerate, tmp_path):
    for number in range(3):
        samples.write(tmp_path / f"checkpoint_{number}", age=1000 - number)
    os.rename(tmp_path / "checkpoint_2", tmp_path / ".replaced_checkpoint_2")  # the only copy
    samples.write(tmp_path / ".replaced_checkpoint_1")  # the former one
    samples.touch(tmp_path, 5000)
    words = ("prune", tmp_path, "--keep", "2", "--incomplete")
    assert "\n2 would be removed (" in run(accelerate, *words, "--dry_run")[1]
    status, out, _ = run(accelerate, *words, "--yes")
    assert status == 0
    assert out.endswith("\n2 removed.\n")
    assert f"{tmp_path / '.replaced_checkpoint_2'}  " in out
    assert "gets its name back" in out
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_1", "checkpoint_2"]


def test_prune_looks_again_after_asking(accelerate, tmp_path, monkeypatch):
    for number in range(3):
        samples.write(tmp_path / f"checkpoint_{number}", age=1000 - number)
    (tmp_path / "checkpoint_7").mkdir()
    (tmp_path / "checkpoint_8").mkdir()
    (tmp_path / "checkpoint_9").mkdir()
    samples.touch(tmp_path, 5000)

    def answer(question):
        samples.write(tmp_path / "checkpoint_7", age=5)  # a run goes on there
        samples.write(tmp_path / "checkpoint_0", age=5)
        samples.touch(tmp_path / "checkpoint_9", 4000)
        return True

    monkeypatch.setattr(module, "_agreed", answer)
    status, out, _ = run(accelerate, "prune", tmp_path, "--keep", "1", "--incomplete")
    assert status == 0
    assert out.endswith("2 removed.\n")  # checkpoint_1 and checkpoint_8
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_0", "checkpoint_2", "checkpoint_7", "checkpoint_9"]


def test_prune_says_what_it_could_not_remove(accelerate, project, monkeypatch):
    from accelerate.checkpoint.storage import LocalStorage

    def refuse(place):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalStorage, "remove", refuse)
    status, out, err = run(accelerate, "prune", project, "--keep", "3", "--yes")
    assert status == 1
    assert "checkpoint_0 could not be removed" in err
    assert out.endswith("0 removed.\n")


# -- object stores -----------------------------------------------------------------------------------------------------


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


def test_object_store(accelerate, store, tmp_path):
    from safetensors.torch import load_file

    _, out, _ = run(accelerate, "ls", store)
    assert [row[0] for row in rows(out)[1:]] == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert [row[1] for row in rows(out)[2:]] == ["1", "2"]
    assert "incomplete: optimizer.bin is missing" in out
    status, out, _ = run(accelerate, "verify", store)
    assert status == 1
    assert "2 of 3 checkpoints are whole." in out
    status, out, _ = run(accelerate, "info", f"{store}/checkpoint_2")
    assert status == 0
    assert "5 with 66 numbers" in out
    assert run(accelerate, "export", f"{store}/checkpoint_2", tmp_path / "out")[0] == 0
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 5
    assert run(accelerate, "prune", store, "--keep", "1", "--yes")[0] == 0
    told = json.loads(run(accelerate, "ls", store, "--json")[1])
    assert [one["name"] for one in told] == ["checkpoint_0", "checkpoint_2"]
    assert run(accelerate, "ls", "memory://bucket/nowhere")[0] == 2
    assert run(accelerate, "ls", "nonsense://bucket/nowhere")[0] == 2


def test_prune_of_an_object_store_leaves_what_cannot_be_read_here(accelerate, store, monkeypatch):
    monkeypatch.setattr(module, "BUSY_SECONDS", -60)
    memory = pytest.importorskip("fsspec").filesystem("memory")
    path = f"/bucket/run/checkpoint_1/{NAME}"
    memory.pipe(path, json.dumps({**json.loads(memory.cat(path)), "format": 99}).encode())
    status, out, _ = run(accelerate, "prune", store, "--keep", "1", "--incomplete", "--yes")
    assert status == 0
    assert "checkpoint_1 stays" in out
    assert [memory.exists(f"/bucket/run/checkpoint_{number}/{NAME}") for number in range(3)] == [False, True, True]


# -- the program -------------------------------------------------------------------------------------------------------


def test_without_a_subcommand(accelerate):
    status, _, err = run(accelerate)
    assert status == 2
    assert "prune" in err


def test_as_a_program_without_torch(project):
    program = (
        "import sys\nfrom accelerate.commands.accelerate_cli import main\n"
        "statuses = []\n"
        "for words in {commands!r}:\n"
        "    sys.argv = ['accelerate', 'checkpoint', *words]\n"
        "    try:\n        main()\n        statuses.append(0)\n"
        "    except SystemExit as end:\n        statuses.append(end.code)\n"
        "heavy = [name for name in ('torch', 'numpy', 'huggingface_hub', 'safetensors') if name in sys.modules]\n"
        "print(statuses, heavy)"
    )
    folder = str(project / "checkpoints")
    commands = [
        ["ls", folder],
        ["info", f"{folder}/checkpoint_0"],
        ["verify", folder],
        ["prune", folder, "--keep", "1", "--yes"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", program.format(commands=commands)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 0, 1, 0] []"
    assert done.stderr == ""
    assert os.listdir(project / "checkpoints" / "checkpoint_3")
    assert NAME in os.listdir(project / "checkpoints" / "checkpoint_3")
    assert left_in(project) == ["checkpoint_3", "checkpoint_4"]


def test_as_a_program(project, tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "checkpoint"]
    listed = subprocess.run([*command, "ls", str(project)], capture_output=True, text=True, timeout=120)
    assert (listed.returncode, len(listed.stdout.splitlines())) == (0, 6), listed.stderr
    folder = str(project / "checkpoints" / "checkpoint_3")
    program = "import sys; from accelerate.commands.accelerate_cli import main; main(); from accelerate.process import PartialState; assert not PartialState._shared_state"
    done = subprocess.run(
        [sys.executable, "-c", program, "checkpoint", "export", folder, "out"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_checkpoints_of_a_run(accelerate, tmp_path):
    import torch
    from safetensors.torch import load_file

    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    made = Accelerator(cpu=True, project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        made.save_state()
    told = json.loads(run(accelerate, "ls", tmp_path, "--json")[1])
    assert [(one["name"], one["state"], one["iteration"]) for one in told] == [
        (f"checkpoints/checkpoint_{number}", "complete", number) for number in range(3)
    ]
    assert run(accelerate, "verify", tmp_path)[0] == 0
    folder = tmp_path / "checkpoints" / "checkpoint_2"
    assert ["1.weight", "0.weight", "model.safetensors"] in rows(run(accelerate, "info", folder)[1])
    assert run(accelerate, "export", folder, tmp_path / "out")[0] == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert set(exported) == {"0.weight", "0.bias", "1.bias"}
    assert torch.equal(exported["0.weight"], model[0].weight)
    assert run(accelerate, "prune", tmp_path, "--keep", "1", "--yes")[0] == 0
    assert left_in(tmp_path) == ["checkpoint_2"]


def test_a_disk_that_refuses_is_no_mistake_of_the_users(capsys, monkeypatch, tmp_path):
    def full(args):
        raise OSError(28, "No space left on device")

    parser = module.checkpoint_command_parser()
    args = parser.parse_args(["ls", str(tmp_path)])
    args.run = full
    with pytest.raises(SystemExit) as ended:
        or_exit("accelerate checkpoint", module.checkpoint_command, args)
    assert ended.value.code == 1 and "No space left on device" in capsys.readouterr().err
