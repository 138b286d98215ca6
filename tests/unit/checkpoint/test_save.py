"""What a rank collects is written as it was, also when the run has gone on meanwhile; and ranks that meet without a store."""

import os
import threading
from collections import Counter, OrderedDict, defaultdict
from types import SimpleNamespace

import pytest
import torch

from accelerate.checkpoint import barrier
from accelerate.checkpoint.barrier import CollectiveMisuse, Group
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.save import HostBuffers, Save, SavePlan, copied, snapshot
from accelerate.checkpoint.storage import storage_of


def test_memory_is_used_again_and_views_share_a_copy(tmp_path):
    buffers, addresses = HostBuffers(), []
    base = torch.zeros(1000)
    for _ in range(3):
        plan = SavePlan(str(tmp_path))
        plan.add_object("f", {"all": base, "part": base[10:], "other": torch.ones(50)})
        snapshot(plan, buffers)
        found = plan._jobs["f"][1]
        assert found["all"].untyped_storage().data_ptr() == found["part"].untyped_storage().data_ptr()
        assert found["all"].data_ptr() != base.data_ptr()
        addresses.append((found["all"].data_ptr(), found["other"].data_ptr()))
        buffers.release()
        buffers.release()  # twice does nothing
    assert len(set(addresses)) == 1


def test_every_kind_is_copied_as_it_is():
    versioned = OrderedDict(a=torch.ones(1))
    versioned._metadata = OrderedDict({"": {"version": 2}})
    many, shared, loop = defaultdict(list, a=[1]), [1], {"x": [1]}
    loop["loop"] = loop
    milestones, odd = Counter({3: 1, 6: 1}), SimpleNamespace(loss=torch.ones(2, requires_grad=True) * 2, numbers=[1])
    complex_ = torch.ones(1, dtype=torch.complex64).conj()
    state = {"milestones": milestones, "many": many, "own": Sub(a=1), "versioned": versioned, "loop": loop, "odd": odd}
    state |= {"twice": (shared, shared), "sparse": torch.eye(2).to_sparse(), "conj": complex_}
    found = copied(state)
    assert found["milestones"] == milestones and type(found["milestones"]) is Counter and type(found["own"]) is Sub
    assert found["many"].default_factory is list and found["versioned"]._metadata == versioned._metadata
    assert found["twice"][0] is found["twice"][1] and found["twice"][0] is not shared
    assert found["loop"]["loop"] is found["loop"] and found["loop"] is not loop
    many["a"].append(2), shared.append(2), odd.numbers.append(2)
    assert found["many"] == {"a": [1]} and found["twice"] == ([1], [1]) and found["odd"].numbers == [1]
    assert found["odd"].loss.tolist() == [2, 2] and found["odd"].loss is not odd.loss
    assert torch.equal(found["sparse"].to_dense(), torch.eye(2)) and found["conj"].is_conj()


class Sub(dict):
    """A dict with a name."""


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


@pytest.mark.parametrize("differ", [False, True])
def test_ranks_without_a_store_meet_by_collectives(tmp_path, monkeypatch, differ):
    meeting, said, local, ended = threading.Barrier(2), {}, threading.local(), {}

    def gather_object(obj):
        said[local.rank] = obj
        meeting.wait()
        found = [said[0], said[1]]
        meeting.wait()
        return found

    communicator = SimpleNamespace(gather_object=gather_object)
    monkeypatch.setattr("accelerate.checkpoint.barrier.comm.current", lambda: communicator)
    monkeypatch.setattr(barrier, "default_store", lambda: None)

    def play(rank):
        local.rank = rank
        place = storage_of(tmp_path / (f"c{rank}" if differ else "c"))
        save = Save(place, Group(rank, 2, rank, False, True), {"world_size": 2})
        assert not save.barrier.in_background
        try:
            save.begin()
            save.plan.add_bytes(f"custom_checkpoint_{rank}.pkl", b"x" * 1000)
            save.finish()
            ended[rank] = save.barrier.name
        except CollectiveMisuse as error:
            ended[rank] = str(error)

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    if differ:
        assert all("different paths" in text for text in ended.values()) and len(ended) == 2
        return
    manifest = Manifest.read(tmp_path / "c")
    parts = {f"custom_checkpoint_{rank}.pkl" for rank in range(2)}
    assert set(manifest.files) == {*parts, "accelerate_manifest_parts/1.json"}
    assert set(manifest.detailed(tmp_path / "c", manifest.files)) == set(manifest.files)
    assert set(ended.values()) == {manifest.save}
