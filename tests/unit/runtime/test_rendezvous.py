"""Meeting the other processes, and a fork, which waits for torch's threads and for no others."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accelerate.runtime import rendezvous, torch_private
from accelerate.runtime.rendezvous import Ranks


def test_timeout_of_the_live_group_can_be_read_and_changed(process_group):
    assert torch_private.live_timeout() == timedelta(minutes=30)
    assert torch_private.set_live_timeout(timedelta(seconds=7))
    assert torch_private.live_timeout() == timedelta(seconds=7)


@pytest.mark.parametrize(("other", "shared"), [("GPU-1", True), ("GPU-2", False)])
def test_processes_that_share_a_device_are_told_the_way_out(monkeypatch, process_group, other, shared):
    # Two processes that see one device each: the same one, or each its own. The other one came first.
    store = dist.HashStore()
    keys = dist.PrefixStore(f"accelerate/device/{socket.gethostname()}", store)
    keys.compare_set(f"of {other}", "", "1")
    keys.add("come", 1)

    class Properties:
        uuid = "GPU-1"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    ranks = Ranks(0, 2, 0, 2, "torchrun")
    if shared:
        with pytest.raises(ValueError, match=r"0 and 1.*GPU-1.*backend='nccl'.*backend='gloo'"):
            rendezvous.check_devices_are_distinct(ranks, torch.device("cuda", 0), "nccl")
        assert not dist.is_initialized()
    else:
        rendezvous.check_devices_are_distinct(ranks, torch.device("cuda", 0), "nccl")


@pytest.mark.parametrize(
    ("stat", "awake"),
    [
        (b"12 (pt_gloo_runloop) D 1 12", True),
        (b"12 (pt_nccl_watchdg) R 1 12", True),
        (b"12 (python) R 1 12", False),
        (b"12 (pt_odd) R name) S 1 12", False),
    ],
)
def test_which_threads_are_waited_for(tmp_path, stat, awake):
    task = tmp_path / "stat"
    task.write_bytes(stat)
    assert rendezvous._runs(task) is awake


def test_a_fork_waits_until_the_thread_sleeps_and_not_for_ever(tmp_path, monkeypatch):
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stat").write_bytes(b"1 (pt_gloo_runloop) R 1")
    pauses = []

    def pause(_):
        pauses.append(1)
        (tmp_path / str(min(len(pauses), 2)) / "stat").write_bytes(b"1 (pt_gloo_runloop) S 1")

    monkeypatch.setattr(rendezvous, "_TASKS", tmp_path)
    monkeypatch.setattr(rendezvous.time, "sleep", pause)
    rendezvous._rest()
    assert len(pauses) == 2
    monkeypatch.setattr(rendezvous.time, "sleep", lambda _: pauses.append(1))
    monkeypatch.setattr(rendezvous, "_LIMIT_S", 0.01)
    (tmp_path / "1" / "stat").write_bytes(b"1 (pt_gloo_runloop) R 1")
    rendezvous._rest()
    assert len(pauses) > 2
