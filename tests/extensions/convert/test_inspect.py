"""What is said of checkpoints that no run loads, and which of them may go; the rest is in the tests of the command."""

import json
import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint import metadata

import checkpoint_samples as samples
from accelerate.checkpoint import manifest
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint
from accelerate.checkpoint.storage import storage_of
from accelerate.extensions.convert import inspect
from accelerate.extensions.export import headers


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
    samples.foreign(tmp_path)  # weights next to checkpoints are none
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


def test_details_without_a_manifest(tmp_path):
    folder = samples.foreign(tmp_path / "epoch_0")
    (folder / "sub").mkdir()
    (folder / "sub" / "part.safetensors").write_bytes(b"no such thing")
    values = inspect.details(storage_of(folder)).to_json()
    assert (values["tensors"]["parameters"], values["tied"]) == (66, {})
    assert values["files"]["sub/part.safetensors"] == {"size": 13, "rank": None}
    with pytest.raises(FileNotFoundError, match="epoch_0: name one"):
        inspect.details(storage_of(tmp_path))


def test_object_in_shards_that_has_a_size_is_no_tensor(tmp_path):
    entry = metadata.BytesStorageMetadata()
    entry.size = torch.Size((1,))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata.Metadata({"w": entry}, {}, {})))
    assert headers.tensors_of_shards(str(tmp_path)) == {}


def test_of_a_foreign_checkpoint_files_that_no_reader_can_open_are_named(tmp_path):
    folder = samples.foreign(tmp_path / "epoch_0")
    (one,) = inspect.survey(storage_of(tmp_path))
    torch.save({"weight": torch.zeros(2)}, folder / "whole.pt")
    torch.save(samples.foreign, folder / "code.pt")  # no plain data: nothing tells whether it is complete
    (folder / "whole.json").write_text("{}")
    assert inspect.verify(one) == []
    for name, size in (("whole.pt", 300), ("whole.json", 1), ("model.safetensors", 100)):
        os.truncate(folder / name, size)
    (folder / "empty.bin").write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "model-9.safetensors"}}')
    names = ["empty.bin", "model.safetensors", "model.safetensors.index.json", "whole.json", "whole.pt"]
    assert [line.split()[0] for line in inspect.verify(one)] == names


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}'])
def test_damaged_indexes(text):
    with pytest.raises(DamagedCheckpoint, match="no index"):
        manifest.weight_map(text, "x")


def test_the_newest_one_that_can_be_verified_stays_whatever_is_newer(tmp_path):
    samples.write(tmp_path / "checkpoint_0", age=100)
    samples.foreign(tmp_path / "checkpoint_1", age=50)
    samples.foreign(tmp_path / "checkpoint_2", age=20)
    (tmp_path / "checkpoint_3").mkdir()
    (tmp_path / "checkpoint_3" / "notes.txt").touch()  # the user's own
    assert inspect.plan_pruning(storage_of(tmp_path), keep=1).old == []
    assert [one.name for one in inspect.plan_pruning(storage_of(tmp_path), 1, foreign=True).old] == ["checkpoint_1"]
