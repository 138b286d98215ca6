"""What is said of checkpoints that no run loads, and which of them may go; the rest is in the tests of the command."""

import json

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

import checkpoint_samples as samples
from accelerate.checkpoint import inspect
from accelerate.checkpoint.manifest import INCOMPLETE_MARKER, NAME, DamagedCheckpoint, TensorEntry
from accelerate.checkpoint.storage import storage_of


def found(folder):
    return inspect.survey(storage_of(folder))


def test_a_project_folder(tmp_path):
    samples.write(tmp_path / "checkpoints" / "checkpoint_2", age=50, iteration=2)
    samples.write(tmp_path / "checkpoints" / "checkpoint_10", age=40, iteration=10)
    samples.write(tmp_path / "best", age=70)
    samples.foreign(tmp_path / "epoch_3", age=80)
    (tmp_path / "checkpoint_1").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.1").write_text("x")
    assert [(one.name, one.state.kind) for one in found(tmp_path)] == [
        *(("epoch_3", "foreign"), ("best", "complete"), ("checkpoints/checkpoint_2", "complete")),
        *(("checkpoints/checkpoint_10", "complete"), ("checkpoint_1", "incomplete")),
    ]
    assert found(tmp_path / "logs") == []
    for look in (inspect.survey, inspect.details, lambda folder: inspect.plan_pruning(folder, 1)):
        with pytest.raises(FileNotFoundError, match="no such folder"):
            look(storage_of(tmp_path / "nowhere"))
    names = {one.name for one in found(tmp_path)}
    samples.foreign(tmp_path)  # weights beside checkpoints are none
    assert {one.name for one in found(tmp_path)} == names


@pytest.mark.parametrize("date", ["yesterday", None])
def test_where_no_manifest_says_when_it_was_saved(tmp_path, date):
    folder = samples.write(tmp_path / "checkpoint_0")
    values = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps({**values, "created": date}))
    if date is None:
        folder = samples.foreign(tmp_path / "epoch_3")
    samples.touch(folder, 500)
    (one,) = found(folder)
    assert 499 < one.age < 560 and one.to_json()["step"] == (None if date is None else 0)


@pytest.mark.parametrize(
    ("damage", "unread"),
    [
        (lambda folder: folder.rename(folder.parent / "elsewhere"), False),
        (lambda folder: [file.unlink() for file in folder.iterdir()], False),
        (lambda folder: (folder / INCOMPLETE_MARKER).touch(), False),
        (lambda folder: (folder / NAME).unlink(), False),
        (lambda folder: (folder / NAME).write_text("{"), True),
    ],
    ids=["absent", "empty", "marked", "no manifest", "broken manifest"],
)
def test_of_what_is_incomplete_verify_says_why(tmp_path, damage, unread):
    folder = samples.write(tmp_path / "checkpoint_0")
    damage(folder)
    summary = inspect.summarize(storage_of(folder))
    assert (inspect.verify(summary), summary.unread) == ([storage_of(folder).state().reason], unread)


def test_details_without_a_manifest(tmp_path):
    folder = samples.foreign(tmp_path / "epoch_0")
    (folder / "sub").mkdir()
    (folder / "sub" / "part.safetensors").write_bytes(b"no such thing")
    values = inspect.details(storage_of(folder)).to_json()
    assert (values["tensors"]["parameters"], values["tied"]) == (66, {})
    assert values["files"]["sub/part.safetensors"] == {"size": 13, "rank": None}
    with pytest.raises(FileNotFoundError, match="epoch_0: name one"):
        inspect.details(storage_of(tmp_path))


def test_headers(tmp_path):
    path = samples.write(tmp_path / "best") / "model.safetensors"
    header = inspect.header_of(str(path))
    assert {name: entry.shape for name, entry in header.items()} == {
        name: tuple(value.shape) for name, value in samples.tensors().items()
    }
    state = {"model": {"a": torch.arange(200.0), "b": torch.ones(3, 5), "extra": "text"}}
    save(state, storage_writer=FileSystemWriter(tmp_path / "shards"), no_dist=True)
    found = inspect.tensors_of_shards(str(tmp_path / "shards"))
    assert found == {"a": TensorEntry((200,), "F32"), "b": TensorEntry((3, 5), "F32")}
    data = path.read_bytes()
    for damaged in (b"", data[:7], b"\xff" * 8 + data[8:], data[:8] + b"[" * (len(data) - 8), data[:-1], data + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint):
            inspect.header_of(str(path))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}'])
def test_damaged_indexes(text):
    with pytest.raises(DamagedCheckpoint, match="no index"):
        inspect.weight_map(text, "x")


def test_the_newest_one_that_can_be_verified_stays_whatever_is_newer(tmp_path):
    samples.write(tmp_path / "checkpoint_0", age=100)
    samples.foreign(tmp_path / "checkpoint_1", age=50)
    samples.foreign(tmp_path / "checkpoint_2", age=20)
    assert inspect.plan_pruning(storage_of(tmp_path), keep=1).old == []
    assert [one.name for one in inspect.plan_pruning(storage_of(tmp_path), 1, foreign=True).old] == ["checkpoint_1"]
