"""Merging the shards of a checkpoint: what comes out, what is refused, and that a half file never has the name."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, save

import sharded_io
from accelerate.checkpoint.convert import reshard


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, dtype=torch.bfloat16))


@pytest.fixture
def checkpoint(place, net):
    """A checkpoint as three ranks write it, with an optimizer."""
    optimizer = torch.optim.AdamW(net[:1].parameters())
    net[0](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    sharded_io.save_model(net, place / "one", layout="sharded")
    sharded_io.save_optimizer(optimizer, net, place / "one", layout="sharded")
    reshard(str(place / "one"), str(place / "three"), "sharded", 3)
    return place / "three"


@pytest.fixture
def shards(checkpoint):
    return checkpoint / "pytorch_model_fsdp_0"


def same(mine, theirs):
    return mine.keys() == theirs.keys() and all(
        mine[name].dtype is theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine
    )


def refused(accelerate, *words, status=2):
    """Require one line on stderr; return it."""
    got, out, err = accelerate("merge-weights", *map(str, words))
    assert (got, out) == (status, "")
    assert err.startswith("accelerate merge-weights: error: ")
    assert len(err.splitlines()) == 1
    return err


def test_merged(accelerate, place, shards, net):
    assert len(list(shards.glob("*.distcp"))) == 3
    status, out, _ = accelerate("merge-weights", str(shards), "new/folder")
    assert status == 0 and "model.safetensors: 1.02 KB" in out
    assert same(load_file("new/folder/model.safetensors"), net.state_dict())
    assert os.listdir("new/folder") == ["model.safetensors"]
    assert accelerate("merge-weights", str(shards), "pickled", "--unsafe_serialization")[0] == 0
    assert same(torch.load("pickled/pytorch_model.bin", weights_only=True), net.state_dict())
    assert shards.is_dir()


def test_shards_are_removed(accelerate, place, shards, net):
    assert accelerate("merge-weights", str(shards), "out", "--remove_checkpoint_dir")[0] == 0
    assert not shards.exists() and (shards.parent / "optimizer_0").is_dir()
    assert same(load_file("out/model.safetensors"), net.state_dict())


def test_result_inside_of_what_is_removed(accelerate, shards):
    assert "which remove_checkpoint_dir deletes" in refused(
        accelerate, shards, shards / "out", "--remove_checkpoint_dir"
    )
    assert len(list(shards.glob("*.distcp"))) == 3


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_no_shards(accelerate, place, checkpoint):
    assert "nowhere does not exist" in refused(accelerate, "nowhere", "out")
    (place / "empty").mkdir()
    assert "it has no .metadata file" in refused(accelerate, "empty", "out")
    assert f"Did you mean {checkpoint / 'pytorch_model_fsdp_0'}?" in refused(accelerate, checkpoint, "out")
    assert "holds the state of an optimizer" in refused(accelerate, checkpoint / "optimizer_0", "out")
    (place / "file").touch()
    assert "'file' is a file; name the folder of shards" in refused(accelerate, "file", "out")
    assert not (place / "out").exists()


def test_output_exists(accelerate, place, shards, net):
    (place / "file").write_text("mine")
    assert "'file' is a file; name a folder" in refused(accelerate, shards, "file")
    (place / "out").mkdir()
    (place / "out" / "model.safetensors").write_text("mine")
    error = refused(accelerate, shards, "out", "--remove_checkpoint_dir")
    assert "has weights already: model.safetensors" in error and "--overwrite" in error
    assert (place / "out" / "model.safetensors").read_text() == "mine" and shards.is_dir()
    assert "model.safetensors" in refused(accelerate, shards, "out", "--unsafe_serialization")
    assert accelerate("merge-weights", str(shards), "out", "--overwrite")[0] == 0
    assert same(load_file("out/model.safetensors"), net.state_dict())


def test_damaged_shards(accelerate, tmp_path):
    save({"model": {"a": torch.ones(9)}}, storage_writer=FileSystemWriter(tmp_path / "in"), no_dist=True)
    assert accelerate("merge-weights", str(tmp_path / "in"), str(tmp_path / "out"))[0] == 0
    (shard,) = (tmp_path / "in").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    assert f"{shard.name} has 100 bytes" in refused(accelerate, tmp_path / "in", tmp_path / "other")


@pytest.mark.parametrize("option", [(), ("--remove_checkpoint_dir",)])
def test_lost_shard(accelerate, place, shards, option):
    (shards / "__0_1.distcp").unlink()
    assert "__0_1.distcp is missing" in refused(accelerate, shards, "out", *option)
    assert not (place / "out").exists() and (shards / "__0_0.distcp").is_file()


# -- what a half result leaves -----------------------------------------------------------------------------------------


PROGRAM = """
import os, signal, sys
from accelerate.commands import accelerate_cli
how = sys.argv.pop(1)
if how == "killed":
    os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
else:
    import resource
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
accelerate_cli.main()
"""


@pytest.mark.skipif(os.name == "nt", reason="there are no such signals and limits")
@pytest.mark.parametrize(("how", "status"), [("killed", -int(getattr(signal, "SIGKILL", 9))), ("full", 1)])
def test_it_ends_before_the_file_is_whole(accelerate, place, shards, net, how, status):
    (place / "out").mkdir()
    (place / "out" / "model.safetensors").write_text("mine")
    words = ["merge-weights", str(shards), "out", "--overwrite", "--remove_checkpoint_dir"]
    ended = subprocess.run([sys.executable, "-c", PROGRAM, how, *words], capture_output=True, text=True, timeout=120)
    assert ended.returncode == status, ended.stderr
    assert (place / "out" / "model.safetensors").read_text() == "mine"
    assert len(list(shards.glob("*.distcp"))) == 3
    if how == "full":
        assert ended.stderr.startswith("accelerate merge-weights: error: ") and len(ended.stderr.splitlines()) == 1
        assert os.listdir("out") == ["model.safetensors"]
    assert accelerate(*words)[0] == 0
    assert same(load_file("out/model.safetensors"), net.state_dict())
    assert os.listdir("out") == ["model.safetensors"] and not shards.exists()
