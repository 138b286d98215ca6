import copy
import gc
import os
import pickle

import pytest
import torch

from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState, asked_for, is_initialized
from accelerate.utils.environment import parse_flag_from_env


def build(**kwargs):
    return AcceleratorState(cpu=True, _from_accelerator=True, **kwargs)


class Plugin:
    def __init__(self, selected=False, config=None):
        self.selected, self.deepspeed_config = selected, config or {}

    def select(self, _from_accelerator_state=False):
        assert _from_accelerator_state
        self.selected = True

    def _unselect(self):
        self.selected = False

    def set_mixed_precision(self, precision):
        self.precision = precision


def test_is_built_by_an_accelerator_and_holds_the_process_and_the_plugins():
    with pytest.raises(ValueError, match="Accelerator"):
        AcceleratorState()
    assert not is_initialized() and AcceleratorState._shared_state == {}
    state = build()
    assert set(state.__dict__) == {
        *PartialState().__dict__,
        *("deepspeed_plugins", "torch_tp_plugin", "parallelism_config", "device_mesh", "dynamo_plugin"),
        "_mixed_precision",
    }
    assert is_initialized() and state.initialized
    assert AcceleratorState().__dict__ is state.__dict__ is AcceleratorState._shared_state
    assert state.mixed_precision == "no" and not state.is_fsdp2 and state.deepspeed_plugin is None
    assert "Mixed precision type: no" in repr(state)
    assert pickle.loads(pickle.dumps(state)).__dict__ == state.__dict__
    state.distributed_type = "MULTI_GPU"
    assert AcceleratorState().distributed_type == "MULTI_GPU" and PartialState().distributed_type == "NO"
    for call in (state.get_deepspeed_plugin, state.select_deepspeed_plugin):
        with pytest.raises(ValueError, match="not enabled"):
            call("any")
    with pytest.raises(ValueError, match="fsdp_plugin was given"):
        build(fsdp_plugin=Plugin())


@pytest.mark.parametrize("name", ["fp17", ""])
def test_unknown_precision(name, monkeypatch):
    with pytest.raises(ValueError, match=r"mixed_precision.*no, fp8, fp16, bf16"):
        build(mixed_precision=name)
    monkeypatch.setattr("accelerate.state.is_fp8_available", lambda: False)
    with pytest.raises(ValueError, match="torchao"):
        build(mixed_precision="fp8")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "half")
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION: 'half'"):
        build()
    assert not is_initialized()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "BF16")
    assert build().mixed_precision == "bf16"


def test_a_live_state_cannot_change():
    build(mixed_precision="fp16")
    for from_accelerator in (False, True):
        with pytest.raises(ValueError, match=r"'fp16'.*'bf16'"):
            AcceleratorState(mixed_precision="bf16", _from_accelerator=from_accelerator)
    AcceleratorState(mixed_precision="fp16")
    AcceleratorState._shared_state["device"] = torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"cuda:0.*cpu=True"):
        AcceleratorState(cpu=True)


def test_fsdp_plugin_counts_on_the_processor_too():
    with pytest.raises(ValueError, match="deepspeed_plugins and fsdp_plugin"):
        build(deepspeed_plugin=Plugin(), fsdp_plugin=Plugin())
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    state = build(fsdp_plugin=plugin, mixed_precision="bf16")
    assert state.distributed_type == "FSDP" and state.fsdp_plugin is plugin and state.is_fsdp2
    assert plugin.mixed_precision_policy is not None
    state.distributed_type = "NO"
    assert not state.is_fsdp2


def test_loading_on_one_rank_is_announced_as_long_as_the_state_is_there(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")  # so that monkeypatch restores it
    build(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True))
    assert parse_flag_from_env("ACCELERATE_USE_FSDP")
    assert not asked_for("fsdp_plugin")  # or the next Accelerator would be sharded, too
    AcceleratorState._reset_state()
    assert "ACCELERATE_USE_FSDP" not in os.environ
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    build(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True))
    AcceleratorState._reset_state()
    assert asked_for("fsdp_plugin")  # the launcher said so


class Loader:
    def __init__(self, end=False, remainder=-1):
        self.end_of_dataloader, self.remainder = end, remainder


def test_loaders_nest():
    state, outer, inner = GradientState(), Loader(remainder=3), Loader(end=True, remainder=1)
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    assert state.active_dataloader is inner and state.end_of_dataloader and state.remainder == 1
    assert state.dataloader_references == [None, outer, inner]
    state._remove_dataloader(inner)
    assert state.active_dataloader is outer and not state.end_of_dataloader and state.remainder == 3
    state._remove_dataloader(inner)
    state._remove_dataloader(outer)
    assert not state.in_dataloader
    state.dataloader_references = [None, outer, inner]
    assert state.active_dataloader is inner
    del inner
    gc.collect()
    assert state.dataloader_references == [None, outer], "a loader that is gone is not active"


def test_gradient_state_pickles_inside_a_loader():
    state, loader = GradientState(), Loader()
    state._add_dataloader(loader)
    state._set_sync_gradients(False)
    pickled = pickle.dumps(state)
    assert pickle.loads(pickled).__dict__ is state.__dict__, "a copy in this process follows its training"
    assert copy.deepcopy(state) is state
    GradientState._reset_state()  # another process has no state yet
    there = pickle.loads(pickled)
    assert not there.sync_gradients and there.active_dataloader is None and state.in_dataloader
