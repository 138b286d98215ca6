"""Merging the shards of a checkpoint: what comes out, and what is refused. The merging itself: `utils/test_fsdp_utils.py`."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import sharded_io
from accelerate.extensions.convert.convert import reshard
from sharded_io import same


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, dtype=torch.bfloat16))


@pytest.fixture
def shards(place, net):
    """The shards of a checkpoint as three ranks write it, with an optimizer beside."""
    optimizer = torch.optim.AdamW(net[:1].parameters())
    net[0](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    sharded_io.save_model(net, place / "one", layout="sharded")
    sharded_io.save_optimizer(optimizer, net, place / "one", layout="sharded")
    reshard(str(place / "one"), str(place / "three"), "sharded", 3)
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
