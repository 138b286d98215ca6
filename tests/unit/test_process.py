import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accelerate import Accelerator, process
from accelerate.config.enums import DistributedType
from accelerate.config.handlers import InitProcessGroupKwargs
from accelerate.process import PartialState, do_nothing
from accelerate.runtime import storage, torch_private

KEYS = {
    *("_cpu", "backend", "device", "debug", "distributed_type", "num_processes", "process_index"),
    *("local_process_index", "fork_launched"),
}


def pretend(**values):
    """Give the process state other values, as a launcher would."""
    PartialState(cpu=True)
    storage.process.current.update(values)
    return PartialState()


def test_alone(monkeypatch):
    for name in ("ACCELERATE_DEBUG_MODE", "FORK_LAUNCHED", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "1")
    state = PartialState(backend="gloo", timeout=timedelta(seconds=9))  # without a group that is harmless
    assert set(state.__dict__) == KEYS and state.debug and state.fork_launched and state._cpu
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.distributed_type is DistributedType.NO and state.backend is None
    assert state.device == state.default_device == torch.device("cpu")
    assert state.is_main_process and state.is_local_main_process and state.is_last_process
    assert state.initialized and not state.use_distributed
    assert "Num processes: 1" in repr(state) and pickle.loads(pickle.dumps(state)).__dict__ == state.__dict__
    assert state.on_process(lambda: "ran", process_index=3)() == "ran", "alone, a process does everything"
    state.wait_for_everyone()
    state.device = None
    state.set_device()
    assert state.device == torch.device("cpu")
    state.destroy_process_group()


def test_attribute_of_a_state_that_was_never_built():
    state = PartialState.__new__(PartialState)
    assert not state.initialized and "not built" in repr(state)
    with pytest.raises(AttributeError, match="num_processes.*Build `Accelerator"):
        state.num_processes  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'colour'$"):
        PartialState(cpu=True).colour  # noqa: B018


def test_failed_start_leaves_nothing_behind(monkeypatch):
    with pytest.raises(TypeError, match=r"timeot.*timeout"):
        PartialState(cpu=True, timeot=3)
    assert PartialState._shared_state == {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK"):
        PartialState(cpu=True)
    assert PartialState._shared_state == {}
    monkeypatch.delenv("WORLD_SIZE")
    assert PartialState(cpu=True).num_processes == 1


def test_sagemaker_needs_its_package():
    with pytest.raises(ModuleNotFoundError, match="smdistributed"):
        PartialState(_use_sagemaker_dp=True)


@pytest.fixture
def pair(process_group, monkeypatch):
    """A state that believes to be rank 1 of 2, with a live group."""
    monkeypatch.setattr(process.dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(process.dist, "get_rank", lambda *_: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    return PartialState(cpu=True)


def test_a_live_group_is_adopted(pair):
    assert (pair.num_processes, pair.process_index, pair.local_process_index) == (2, 1, 1)
    assert pair.backend == "gloo" and pair.distributed_type is DistributedType.MULTI_CPU
    PartialState._reset_state()
    assert PartialState().__dict__ == {**pair.__dict__, "_cpu": False}


def test_settings_that_cannot_take_effect_name_both_values(pair):
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=7))
    for build in (
        lambda: PartialState(timeout=handler.timeout),
        lambda: Accelerator(cpu=True, kwargs_handlers=[handler]),
    ):
        with pytest.raises(ValueError, match=r"timeout=.*seconds=7.*1800"):
            build()
    with pytest.raises(ValueError, match=r"backend='mpi'.*'gloo'"):
        PartialState(backend="mpi")
    PartialState(timeout=timedelta(minutes=30), backend="gloo")
    PartialState(timeout=None)


def test_after_a_reset_a_timeout_takes_effect_on_the_live_group(pair):
    PartialState._reset_state()
    PartialState(timeout=timedelta(seconds=7))
    assert torch_private.live_timeout() == timedelta(seconds=7)
    PartialState._reset_state()
    with pytest.raises(ValueError, match=r"backend='nccl'.*'gloo'"):
        PartialState(backend="nccl")


def test_state_of_a_destroyed_group_answers_until_one_asks_anew(pair, monkeypatch):
    monkeypatch.undo()
    pair.destroy_process_group()
    assert not dist.is_initialized()
    assert process.group_is_gone(pair.__dict__)
    assert PartialState().process_index == 1
    with pytest.raises(RuntimeError, match="destroyed"):
        pair.wait_for_everyone()
    assert PartialState(cpu=True).num_processes == 1
    assert pair.num_processes == 2


@pytest.mark.parametrize(("rank", "runs"), [(0, True), (1, False)])
def test_main_process_only(rank, runs):
    state = pretend(process_index=rank, local_process_index=rank, num_processes=2, distributed_type="MULTI_CPU")

    def function():
        return "ran"

    expected = function if runs else do_nothing
    assert state.on_main_process(function) is expected
    assert state.on_main_process()(function) is expected
    assert state.on_local_main_process(function) is expected
    assert state.on_process(function, process_index=0) is expected
    assert state.on_process(process_index=0)(function) is expected
    assert state.on_local_process(local_process_index=0)(function) is expected
    assert state.on_last_process(function) is (do_nothing if runs else function)
    assert do_nothing(1, a=2) is None
    with state.split_between_processes([1, 2, 3], apply_padding=True) as piece:
        assert piece == ([1, 2] if runs else [3, 3])


@pytest.mark.parametrize(("rank", "order"), [(0, ["body", "barrier"]), (1, ["barrier", "body"])])
def test_main_process_first_also_when_it_fails(monkeypatch, rank, order):
    state, events = pretend(process_index=rank, local_process_index=rank), []
    monkeypatch.setattr(PartialState, "wait_for_everyone", lambda self: events.append("barrier"))
    for context in (state.main_process_first, state.local_main_process_first):
        events.clear()
        with pytest.raises(KeyError), context():
            events.append("body")
            raise KeyError
        assert events == order
