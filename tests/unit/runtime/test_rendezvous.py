from datetime import timedelta

import pytest
import torch.distributed as dist

from accelerate.runtime import rendezvous
from accelerate.runtime.rendezvous import Ranks


def test_lone_process_gets_a_group_without_a_meeting_point(process_group):
    assert dist.get_world_size() == 1
    assert rendezvous.live_ranks({}) == Ranks(0, 1, 0, 1, "process group")


def test_timeout_of_the_live_group_can_be_read_and_changed(process_group):
    assert rendezvous.live_timeout() == timedelta(minutes=30)
    assert rendezvous.set_live_timeout(timedelta(seconds=7))
    assert rendezvous.live_timeout() == timedelta(seconds=7)


def test_live_ranks_believe_the_group_and_complete_it_from_the_environment(process_group):
    assert rendezvous.live_ranks({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}).world_size == 1
    # variables of another run do not count
    assert rendezvous.live_ranks({"RANK": "5", "WORLD_SIZE": "8"}).local_rank == 0


@pytest.mark.parametrize(("other", "shared"), [("GPU-1", True), ("GPU-2", False)])
def test_processes_that_share_a_device_are_told_the_way_out(monkeypatch, process_group, other, shared):
    # Two processes that see one device each: the same one, or each its own.
    import torch

    values = {}

    class Store:
        def set(self, key, value):
            values[key] = value.encode()
            values[key[:-1] + "1"] = other.encode()

        def get(self, key):
            return values[key]

    class Properties:
        uuid = "GPU-1"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Store)
    ranks = Ranks(0, 2, 0, 2, "torchrun")
    if shared:
        with pytest.raises(ValueError, match=r"0 and 1.*GPU-1.*backend='nccl'.*backend='gloo'"):
            rendezvous.check_devices_are_distinct(ranks, torch.device("cuda", 0), "nccl")
        assert not dist.is_initialized()
    else:
        rendezvous.check_devices_are_distinct(ranks, torch.device("cuda", 0), "nccl")
