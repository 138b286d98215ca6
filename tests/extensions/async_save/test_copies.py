"""What a rank collects is copied as it was when the call was made."""

from collections import Counter, OrderedDict, defaultdict
from types import SimpleNamespace

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from accelerate.checkpoint.save import SavePlan
from accelerate.extensions.async_save.copies import HostBuffers, snapshot
from sharded_samples import fake_group


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


def test_shards_are_copied_into_the_memory_that_is_pinned_for_a_gpu(tmp_path):
    copies = []

    class Recorded(HostBuffers):
        def copy(self, storage):
            copies.append(super().copy(storage))
            return copies[-1]

    buffers = Recorded()
    with fake_group(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        for number in range(2):
            rows = torch.arange(12.0).view(4, 3)[1:3] + number
            shard = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
            plan = SavePlan(str(tmp_path))
            plan.add_object("f", {"rows": shard})
            snapshot(plan, buffers)
            rows += 1
            found = plan._jobs["f"][1]["rows"]
            assert found.placements == shard.placements and found.size() == shard.size()
            assert found.to_local().tolist() == (rows - 1).tolist()
            assert found.to_local().untyped_storage().data_ptr() == copies[-1].data_ptr()
            buffers.release()
    assert len({copy.data_ptr() for copy in copies}) == 1, "memory is used again"


def test_every_kind_is_copied_as_it_is():
    versioned = OrderedDict(a=torch.ones(1))
    versioned._metadata = OrderedDict({"": {"version": 2}})
    many, shared, loop = defaultdict(list, a=[1]), [1], {"x": [1]}
    loop["loop"] = loop
    milestones, odd = Counter({3: 1, 6: 1}), SimpleNamespace(loss=torch.ones(2, requires_grad=True) * 2, numbers=[1])
    complex_ = torch.ones(1, dtype=torch.complex64).conj()
    state = {"milestones": milestones, "many": many, "own": Sub(a=1), "versioned": versioned, "loop": loop, "odd": odd}
    state |= {"twice": (shared, shared), "sparse": torch.eye(2).to_sparse(), "conj": complex_}
    state["nested"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    plan = SavePlan("")
    plan.add_object("f", state)
    snapshot(plan, HostBuffers())
    found = plan._jobs["f"][1]
    assert found["milestones"] == milestones and type(found["milestones"]) is Counter and type(found["own"]) is Sub
    assert found["many"].default_factory is list and found["versioned"]._metadata == versioned._metadata
    assert found["twice"][0] is found["twice"][1] and found["twice"][0] is not shared
    assert found["loop"]["loop"] is found["loop"] and found["loop"] is not loop
    many["a"].append(2), shared.append(2), odd.numbers.append(2)
    assert found["many"] == {"a": [1]} and found["twice"] == ([1], [1]) and found["odd"].numbers == [1]
    assert found["odd"].loss.tolist() == [2, 2] and found["odd"].loss is not odd.loss
    assert torch.equal(found["sparse"].to_dense(), torch.eye(2)) and found["conj"].is_conj()
    assert [len(part) for part in found["nested"].unbind()] == [2, 3] and found["nested"] is not state["nested"]


class Sub(dict):
    """A dict with a name."""
