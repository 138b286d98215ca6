"""Weights of a model in files for other programs, which are replaced at once."""

import os
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import checkpoint_samples as samples
import sharded_io
from accelerate import Accelerator
from accelerate.checkpoint.manifest import DamagedCheckpoint, Manifest
from accelerate.checkpoint.storage import LocalStorage
from accelerate.extensions.big_models.loading import load_checkpoint_in_model
from accelerate.extensions.export.files import write_weights


def test_tied_weights_are_written_once_and_files_that_are_not_shards_stay(tmp_path):
    for name in ("model.safetensors.backup", "my_model.safetensors", "config.json"):
        (tmp_path / name).touch()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    Accelerator(cpu=True).save_model(model, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {"0.weight", "0.bias", "1.bias"}
    assert len(os.listdir(tmp_path)) == 4


def test_a_model_needs_a_folder_and_values(tmp_path):
    accelerator = Accelerator(cpu=True)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        accelerator.save_model(nn.Linear(1, 1), tmp_path / "file")
    with pytest.raises(RuntimeError, match="meta device.*'weight'"):
        accelerator.save_model(nn.Linear(1, 1, device="meta"), tmp_path)


def test_save_model_is_never_a_mixture(tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))

    def fill(value):
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(value)

    fill(1.0)
    accelerator.save_model(model, tmp_path, max_shard_size=300)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    fill(2.0)
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            accelerator.save_model(model, tmp_path, max_shard_size=300)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    accelerator.save_model(model, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors"]
    with pytest.warns(UserWarning, match="readers prefer"):
        accelerator.save_model(model, tmp_path, safe_serialization=False)


def _saves(accelerator, folder, value, size, times):
    """Save a model of one value again and again in a separate process; return its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
        for _ in range(times):
            accelerator.save_model(model, folder, max_shard_size=size)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@pytest.mark.parametrize("sizes", [("1GB", "1GB"), (300, 700)])
def test_processes_save_a_model_into_one_folder(tmp_path, sizes):
    """No save dies, and what is there in the end is the model of one of them."""
    accelerator = Accelerator(cpu=True)
    pids = [_saves(accelerator, tmp_path / "m", value, size, 10) for value, size in enumerate(sizes)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    load_checkpoint_in_model(model, tmp_path / "m", strict=True)
    assert len({value for parameter in model.parameters() for value in parameter.flatten().tolist()}) == 1
    assert not [*(tmp_path / "m").glob(".*")]


def test_saving_a_model_removes_what_killed_saves_left_and_nothing_else(tmp_path):
    (tmp_path / ".saving_mine").mkdir()
    at_work = LocalStorage(tmp_path / "weights_1")
    staged = at_work.stage()
    samples.left_behind(tmp_path, "weights_2", "weights_2")
    Accelerator(cpu=True).save_model(nn.Linear(2, 2), tmp_path)
    found = {".lock_weights_1", ".saving_mine", "model.safetensors", Path(staged).parent.name}
    assert set(os.listdir(tmp_path)) == found and os.path.isdir(staged)


def test_files_that_an_index_lists_are_compared(tmp_path):
    model = nn.Linear(3, 3)
    Manifest(write_weights(tmp_path, model.state_dict(), "model{suffix}.safetensors", 40)).write(tmp_path)
    sharded_io.load_model(model, tmp_path)
    file = sorted(tmp_path.glob("model-00002-*.safetensors"))[0]
    samples.flip(file)
    with pytest.raises(DamagedCheckpoint, match=f"{file.name} has changed"):
        sharded_io.load_model(model, tmp_path)
