"""What a rank collects is written by its plan; and ranks that meet without a store."""

import os
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch

from accelerate.checkpoint import formats
from accelerate.checkpoint import ranks as checkpoint_ranks
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.ranks import CollectiveMisuse, Group
from accelerate.checkpoint.save import Save, SavePlan
from accelerate.checkpoint.storage import storage_of
from accelerate.extensions.object_store.object_store import _Objects


def test_an_error_of_one_file_comes_out(tmp_path, monkeypatch):
    plan = SavePlan(str(tmp_path))
    assert os.path.join(plan, "x") == str(tmp_path / "x")
    plan.add_tensors("f", {"odd": 3})
    with pytest.raises(TypeError, match="'odd'"):
        plan.write()
    plan = SavePlan(str(tmp_path))
    plan.add_object("optimizer.bin", {"state": torch.ones(3)})
    monkeypatch.setattr(os, "write", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plan.write()


def test_a_plan_writes_some_files_before_others_and_leaves_those_that_were_changed(tmp_path):
    plan = SavePlan(str(tmp_path), rank=3)
    plan.add_bytes("second", b"2")
    plan.add_bytes("first", b"1")
    plan.write_file("first")
    assert f"{plan}/first" == str(tmp_path / "first") and not (tmp_path / "second").exists()
    (tmp_path / "first").write_bytes(b"other")  # other code's
    plan.forget("first")
    assert set(plan.contents()) == {"second"} and set(plan.write()) == set(plan.write()) == {"second"}
    assert plan.write()["second"] == formats.describe(tmp_path / "second", 3)


def on_two_ranks(monkeypatch, play):
    """Call a function with each of two ranks, in threads of which `gather_object` joins what they say."""
    meeting, said, local = threading.Barrier(2), {}, threading.local()

    def gather_object(obj):
        said[local.rank] = obj
        meeting.wait()
        found = [said[0], said[1]]
        meeting.wait()
        return found

    def run(rank):
        local.rank = rank
        play(rank)

    communicator = SimpleNamespace(gather_object=gather_object)
    monkeypatch.setattr("accelerate.checkpoint.ranks.comm.current", lambda: communicator)
    monkeypatch.setattr(checkpoint_ranks, "default_store", lambda: None)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    return threads


def save_to(location, rank, content=b"x" * 1000):
    storage = storage_of(location)
    save = Save(storage, Group(rank, 2, rank, False, storage.shared), {"world_size": 2})
    assert not save.ranks.can_run_in_thread
    save.begin()
    save.plan.add_bytes(f"custom_checkpoint_{rank}.pkl", content)
    save.finish()
    return save.ranks.name


@pytest.mark.parametrize("differ", [False, True])
def test_ranks_without_a_store_meet_by_collectives(tmp_path, monkeypatch, differ):
    ended = {}

    def play(rank):
        try:
            ended[rank] = save_to(tmp_path / (f"c{rank}" if differ else "c"), rank)
        except CollectiveMisuse as error:
            ended[rank] = str(error)

    [thread.join() for thread in on_two_ranks(monkeypatch, play)]
    if differ:
        assert all("different paths" in text for text in ended.values()) and len(ended) == 2
        return
    manifest = Manifest.read(tmp_path / "c")
    parts = {f"custom_checkpoint_{rank}.pkl" for rank in range(2)}
    assert set(manifest.files) == {*parts, "accelerate_manifest_parts/1.json"}
    assert set(manifest.detailed(tmp_path / "c", manifest.files)) == set(manifest.files)
    assert set(ended.values()) == {manifest.save}


@pytest.mark.parametrize("remote", [False, True])
def test_no_rank_waits_for_the_removal_of_the_former_checkpoint(tmp_path, monkeypatch, request, caplog, remote):
    """It was a part of publishing, so that all ranks waited for one `rmtree`."""
    if remote:
        request.getfixturevalue("memory")
    location = "memory://run/c" if remote else tmp_path / "c"
    names, may_remove = {0: {}, 1: {}}, threading.Event()
    [thread.join() for thread in on_two_ranks(monkeypatch, lambda rank: names[rank].update(a=save_to(location, rank)))]
    if not remote:
        (tmp_path / "c" / "notes.txt").write_text("mine")

    def removal(*args, **options):
        may_remove.wait()
        raise OSError("the disk refuses")

    monkeypatch.setattr(*((_Objects, "remove") if remote else (shutil, "rmtree")), removal)
    threads = on_two_ranks(monkeypatch, lambda rank: names[rank].update(b=save_to(location, rank, b"y")))
    threads[1].join(20)
    try:
        assert not threads[1].is_alive() and threads[0].is_alive()
        state = storage_of(location).state()
        assert (state.kind, state.manifest.save) == ("complete", names[1]["b"])
        assert remote or (tmp_path / "c" / "notes.txt").read_text() == "mine"
    finally:
        may_remove.set()
        [thread.join() for thread in threads]
    assert names[0] == names[1], "what cannot be removed is no error"
    assert "the disk refuses" in caplog.text and ("memory://run/c" if remote else ".saving_") in caplog.text
    monkeypatch.undo()
    storage_of(location).parent().sweep()
    assert remote or os.listdir(tmp_path) == ["c"]
    assert not storage_of(location).parent().leftovers() and storage_of(location).state().loads
