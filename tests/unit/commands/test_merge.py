"""Merging of shards goes to the function that does it."""

import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from accelerate.utils import fsdp_utils


def test_arguments_arrive(accelerate, monkeypatch):
    calls = []
    monkeypatch.setattr(fsdp_utils, "merge_fsdp_weights", lambda *args: calls.append(args))
    assert accelerate("merge-weights", "in", "out")[0] == 0
    assert accelerate("merge-weights", "in", "out", "--unsafe-serialization", "--remove_checkpoint_dir")[0] == 0
    assert calls == [("in", "out", True, False), ("in", "out", False, True)]


def test_missing_checkpoint(accelerate):
    status, _, err = accelerate("merge-weights", "nowhere", "out")
    assert status == 2
    assert "nowhere" in err


def test_damaged_shards(accelerate, tmp_path):
    save({"model": {"a": torch.ones(9)}}, storage_writer=FileSystemWriter(tmp_path / "in"), no_dist=True)
    assert accelerate("merge-weights", str(tmp_path / "in"), str(tmp_path / "out"))[0] == 0
    (shard,) = (tmp_path / "in").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    status, _, err = accelerate("merge-weights", str(tmp_path / "in"), str(tmp_path / "other"))
    assert status == 2
    assert err.startswith("accelerate merge-weights: error: ")
    assert f"{shard.name} has 100 bytes" in err
    assert len(err.splitlines()) == 1
