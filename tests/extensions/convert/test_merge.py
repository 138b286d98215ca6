"""Merging the shards of a checkpoint into one file of weights: what comes out, and what is refused."""

import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import sharded_io
from accelerate.checkpoint.manifest import DamagedCheckpoint, Manifest
from accelerate.checkpoint.save import unlisted
from accelerate.extensions.convert import convert
from accelerate.utils import fsdp_utils as utils
from sharded_io import same
from sharded_samples import net as tied_net


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, dtype=torch.bfloat16))


@pytest.fixture
def shards(place, net):
    """The shards of a checkpoint as three ranks write it, with an optimizer next to."""
    optimizer = torch.optim.AdamW(net[:1].parameters())
    net[0](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    sharded_io.save_model(net, place / "one", layout="sharded")
    sharded_io.save_optimizer(optimizer, net, place / "one", layout="sharded")
    convert.reshard(str(place / "one"), str(place / "three"), "sharded", 3)
    return place / "three" / "pytorch_model_fsdp_0"


def test_no_shards(refused, place, shards):
    (place / "empty").mkdir()
    (place / "file").touch()
    for folder, problem in {
        "nowhere": "nowhere does not exist",
        "empty": "it has no .metadata file",
        shards.parent: f"Did you mean {shards}?",
        shards.parent / "optimizer_0": "holds the state of an optimizer",
        "file": "'file' is a file; name the folder of shards",
    }.items():
        assert problem in refused("merge-weights", folder, "out")
    assert not (place / "out").exists()


def test_output_exists(accelerate, refused, place, shards, net):
    (place / "file").write_text("mine")
    assert "'file' is a file; name a folder" in refused("merge-weights", shards, "file")
    (place / "out").mkdir()
    (place / "out" / "model.safetensors").write_text("mine")
    error = refused("merge-weights", shards, "out", "--remove_checkpoint_dir")
    assert "has weights already: model.safetensors" in error and "--overwrite" in error
    assert (place / "out" / "model.safetensors").read_text() == "mine" and shards.is_dir()
    assert "model.safetensors" in refused("merge-weights", shards, "out", "--unsafe_serialization")
    assert accelerate("merge-weights", str(shards), "out", "--overwrite")[0] == 0
    assert same(load_file("out/model.safetensors"), net.state_dict())


def test_lost_shard(refused, place, shards):
    (shards / "__0_1.distcp").unlink()
    assert "__0_1.distcp is missing" in refused("merge-weights", shards, "out", "--remove_checkpoint_dir")
    assert not (place / "out").exists() and (shards / "__0_0.distcp").is_file()


# --- `merge_fsdp_weights` ---


@pytest.fixture
def sharded(tmp_path):
    model = tied_net()
    folder = tmp_path / "checkpoint" / "pytorch_model_fsdp_0"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    return model, folder


def test_merge_and_clean_up(sharded, tmp_path):
    model, folder = sharded
    utils.merge_fsdp_weights(str(folder), str(tmp_path / "merged"))
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    # What a model ties is saved from storage of its own in a sharded checkpoint.
    assert weights and all(torch.equal(value, model.state_dict()[name]) for name, value in weights.items())
    with pytest.raises(ValueError, match="Did you mean .*pytorch_model_fsdp_0"):
        utils.merge_fsdp_weights(folder.parent, tmp_path)
    for target in (folder, folder / "merged"):
        with pytest.raises(ValueError, match="is in checkpoint_dir"):
            utils.merge_fsdp_weights(folder, target, remove_checkpoint_dir=True)
    assert (folder / ".metadata").exists()
    utils.merge_fsdp_weights(folder, tmp_path / "merged", safe_serialization=False, remove_checkpoint_dir=True)
    weights = torch.load(tmp_path / "merged" / "pytorch_model.bin", weights_only=True)
    assert set(weights) == set(model.state_dict())
    assert not folder.exists()


def test_merge_compares_with_the_manifest_and_deletes_nothing_that_is_damaged(tmp_path):
    folder = tmp_path / "checkpoint"
    sharded_io.save_model(tied_net(), folder)
    Manifest(unlisted(str(folder), (), 0)).write(folder)
    file = folder / "pytorch_model_fsdp_0" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="__0_0.distcp has changed"):
        utils.merge_fsdp_weights(file.parent, tmp_path / "merged", remove_checkpoint_dir=True)
    assert file.exists() and not (tmp_path / "merged").exists()


@pytest.mark.parametrize("safe", [True, False])
def test_merge_is_on_the_disk_before_anything_is_deleted(sharded, tmp_path, monkeypatch, safe):
    _, folder = sharded
    (tmp_path / "merged").mkdir()
    file = tmp_path / "merged" / ("model.safetensors" if safe else "pytorch_model.bin")
    file.write_text("older")
    monkeypatch.setattr(convert.durable, "of_file", lambda path: (0, ""))
    with pytest.raises(OSError, match="is not what was written"):
        utils.merge_fsdp_weights(folder, tmp_path / "merged", safe, remove_checkpoint_dir=True)
    monkeypatch.undo()
    assert (folder / ".metadata").exists()
    done = []
    for module, name in ((os, "fsync"), (os, "replace"), (shutil, "rmtree")):
        step = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, step=step, name=name: (done.append(name), step(*args))[1])
    utils.merge_fsdp_weights(folder, tmp_path / "merged", safe, remove_checkpoint_dir=True)
    assert done == ["fsync", "replace", "fsync", "rmtree"]
    assert os.listdir(tmp_path / "merged") == [file.name]


def test_a_sharded_checkpoint_is_merged_into_a_file(tmp_path):
    dcp.save({"model": {"a": torch.arange(3.0)}}, checkpoint_id=tmp_path / "shards")
    path = utils._distributed_checkpoint_to_merged_weights(str(tmp_path / "shards"), str(tmp_path / "out"))
    assert path == tmp_path / "out" / "model.safetensors"
    assert path.is_file()
