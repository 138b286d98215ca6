"""Functions run in several processes; what is refused, and how failures come back."""

import os
import time

import pytest
import torch

from accelerate import launchers
from accelerate.launch.errors import NotAvailableError
from accelerate.launchers import WorkerError, debug_launcher, notebook_launcher
from accelerate.launchers import test_launch as join_only
from accelerate.state import PartialState


class Device:
    """A GPU that is not there."""

    type = "cuda"

    def __init__(self, count=2, in_use=False):
        self._count, self.in_use = count, in_use

    def count(self):
        return self._count

    def namespace(self):
        return type("namespace", (), {"is_initialized": lambda: self.in_use})


@pytest.fixture
def device(monkeypatch):
    return lambda device: monkeypatch.setattr("accelerate.devices.probe.detect", lambda cpu=False: device)


def rank_and_sum(path):
    state = PartialState()
    total = torch.ones(1) * (state.process_index + 1)
    torch.distributed.all_reduce(total)
    (path / str(state.process_index)).write_text(f"{state.num_processes} {state.device} {int(total)}")
    return lambda: "not picklable"


@pytest.mark.parametrize("start", [debug_launcher, notebook_launcher])
def test_two_processes_cooperate(tmp_path, start):
    assert start(rank_and_sum, (tmp_path,), num_processes=2) is None
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"0": "2 cpu 3", "1": "2 cpu 3"}
    assert "RANK" not in os.environ


def fail_on_one():
    if os.environ["RANK"] == "1":
        raise KeyError("what went wrong")
    time.sleep(60)


def test_failure_comes_with_the_traceback_of_the_process():
    with pytest.raises(
        WorkerError, match="(?s)Rank 1 failed in fail_on_one.*in fail_on_one.*KeyError: 'what went wrong'"
    ):
        debug_launcher(fail_on_one)


def test_killed_process():
    with pytest.raises(WorkerError, match="SIGKILL"):
        debug_launcher(lambda: os.kill(os.getpid(), 9), num_processes=1)


def test_one_process_runs_here(monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    seen = []
    notebook_launcher(
        lambda: seen.append((os.getpid(), os.environ["ACCELERATE_MIXED_PRECISION"])), mixed_precision="bf16"
    )
    assert seen == [(os.getpid(), "bf16")]
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_existing_accelerator_is_refused():
    PartialState(cpu=True)
    with pytest.raises(ValueError, match="has an Accelerator already"):
        notebook_launcher(print, num_processes=2)


def test_debug_launcher_starts_afresh(tmp_path):
    state = PartialState(cpu=True)
    debug_launcher(rank_and_sum, (tmp_path,))
    assert state.num_processes == 1


def test_process_group_is_refused(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for start in (debug_launcher, notebook_launcher):
            with pytest.raises(ValueError, match="belongs to a process group"):
                start(print, num_processes=2)
    finally:
        dist.destroy_process_group()


def test_device_in_use_is_refused(device):
    device(Device(in_use=True))
    with pytest.raises(RuntimeError, match="cuda device is in use in this process already"):
        notebook_launcher(print, num_processes=2)


def test_more_processes_than_devices(device):
    device(Device(count=1))
    with pytest.raises(ValueError, match="num_processes is 2, and there are 1 cuda devices"):
        notebook_launcher(print, num_processes=2)


def test_one_process_per_device_by_default(device, monkeypatch):
    device(Device(count=3))
    calls = []
    monkeypatch.setattr(launchers, "_start", lambda f, a, env, n, meeting, **rest: calls.append((n, meeting, env)))
    notebook_launcher(print, use_port="29501")
    ((count, meeting, environment),) = calls
    assert (count, meeting.port) == (3, 29501)
    assert "ACCELERATE_USE_CPU" not in environment


def test_several_machines(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(launchers, "_start", lambda f, a, env, n, meeting, **rest: calls.append((n, meeting, rest)))
    notebook_launcher(print, num_processes=2, num_nodes=2, node_rank=1, master_addr="1.2.3.4", max_restarts=3)
    ((count, meeting, rest),) = calls
    config = launchers._config(count, meeting, str(tmp_path), rest)
    assert (config.min_nodes, config.nproc_per_node, config.max_restarts) == (2, 2, 3)
    assert (config.rdzv_endpoint, config.rdzv_configs["rank"], config.start_method) == ("1.2.3.4:29500", 1, "fork")


def test_unknown_precision():
    with pytest.raises(ValueError, match="mixed_precision is 'fp17'; choose one of"):
        notebook_launcher(print, mixed_precision="fp17")


def test_tpu_is_to_come(device):
    device(type("row", (), {"type": "xla"})())
    with pytest.raises(NotAvailableError, match="TPUs"):
        notebook_launcher(print)


def test_the_launch_test_joins():
    join_only()
    assert PartialState._shared_state
    assert join_only.__test__ is False
