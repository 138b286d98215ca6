"""Merging of shards goes to the function that does it."""

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
