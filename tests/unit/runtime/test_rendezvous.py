"""Meeting the other processes, and a fork, which waits for torch's threads and for no others."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accelerate.runtime import rendezvous
from accelerate.runtime.rendezvous import Ranks
from accelerate.state import PartialState


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


@pytest.mark.parametrize(
    ("stat", "awake"),
    [
        (b"12 (pt_gloo_runloop) R 1 12", True),
        (b"12 (pt_gloo_runloop) D 1 12", True),
        (b"12 (pt_gloo_runloop) S 1 12", False),
        (b"12 (pt_nccl_watchdg) R 1 12", True),
        (b"12 (python) R 1 12", False),
        (b"12 (a (pt_ b) R) R 1 12", False),
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


def test_a_forked_process_lives(monkeypatch):
    rendezvous.fork_when_quiet()
    rendezvous.fork_when_quiet()
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_group_is_given_up_when_its_threads_are_done(monkeypatch):
    order = []
    monkeypatch.setattr(rendezvous, "_rest", lambda: order.append("rest"))
    state = PartialState(cpu=True)
    monkeypatch.setattr("accelerate.process.dist.is_initialized", lambda: True)
    monkeypatch.setattr("accelerate.process.dist.destroy_process_group", lambda group: order.append("destroy"))
    state.destroy_process_group()
    assert order == ["rest"] * rendezvous._ROUNDS + ["destroy"]
