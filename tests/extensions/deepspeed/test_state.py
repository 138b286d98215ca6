"""The states of a process and an Accelerator that train with DeepSpeed, of which a stand-in is there; schedules of its checkpoints."""

import sys
import types

import pytest

from accelerate.extensions.deepspeed import checkpoint as engine_checkpoint
from accelerate.extensions.deepspeed.plugin import DeepSpeedPlugin
from accelerate.state import AcceleratorState, PartialState
from cases import cases


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


def test_deepspeed_gets_a_group_even_alone(monkeypatch, process_group, fake_deepspeed):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    state = PartialState(cpu=True)
    assert state.distributed_type == "DEEPSPEED" and state.backend == "gloo" and state.num_processes == 1
    assert fake_deepspeed == [{"dist_backend": "gloo", "auto_mpi_discovery": False, "verbose": False}]
    assert sys.modules["deepspeed"].ops.__compatible_ops__ == {"shm": False}, "a start would build it, for minutes"


def test_deepspeed_that_is_not_installed_is_named(monkeypatch, process_group):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match="pip install deepspeed"):
        PartialState(cpu=True)


@cases(
    "config, precision",
    ({}, "no"),
    ({"fp16": {"enabled": True}}, "fp16"),
    ({"bf16": {"enabled": True}}, "bf16"),
    ({"fp16": {"enabled": "auto"}}, "no"),
)
def test_deepspeed_says_its_precision(config, precision, process_group, fake_deepspeed):
    state = build(deepspeed_plugin=Plugin(config=config))
    assert state.distributed_type == "DEEPSPEED" and state.mixed_precision == precision
    assert "DeepSpeed configuration" in repr(state)


def test_several_deepspeed_plugins(process_group, fake_deepspeed):
    plugins = {"student": Plugin(), "teacher": Plugin()}
    state = build(deepspeed_plugin=plugins)
    assert state.deepspeed_plugin is plugins["student"]
    state.select_deepspeed_plugin("teacher")
    assert state.deepspeed_plugin is state.get_deepspeed_plugin("teacher") and not plugins["student"].selected
    with pytest.raises(ValueError, match=r"'judge'.*'student', 'teacher'"):
        state.get_deepspeed_plugin("judge")


def test_another_deepspeed_plugin_is_refused(process_group, fake_deepspeed, monkeypatch):
    """One that asks for the same is not: what was left to the objects was filled in meanwhile."""
    monkeypatch.setattr("accelerate.extensions.deepspeed.plugin.is_deepspeed_available", lambda: False)
    plugin = DeepSpeedPlugin(zero_stage=2)
    build(deepspeed_plugin=plugin)
    plugin.deepspeed_config["train_batch_size"] = 16
    for same in (plugin, None, DeepSpeedPlugin(zero_stage=2)):
        assert build(deepspeed_plugin=same).deepspeed_plugin is plugin
    for other, asked in (
        (DeepSpeedPlugin(zero_stage=3), "zero_optimization.stage=3"),
        (DeepSpeedPlugin(gradient_clipping=0.5), "gradient_clipping=0.5"),
        ({"teacher": DeepSpeedPlugin(zero_stage=2)}, "the key 'teacher'"),
    ):
        with pytest.raises(NotImplementedError, match=rf"deepspeed_plugins=.* asks for {asked}.*_reset_state\(True\)"):
            build(deepspeed_plugin=other)


def test_deepspeed_schedules_keep_their_total_on_other_ranks():
    schedule = types.SimpleNamespace(total_num_steps=80)
    head = {"dp_world_size": 2, "ds_config": {"scheduler": {"params": {"total_num_steps": 40}}}}
    with pytest.warns(UserWarning, match="total_num_steps=40, and has 80 on 1"):
        engine_checkpoint._keep_length(schedule, head, 1)
    assert schedule.total_num_steps == 40
    schedule.total_num_steps = 100  # the same ranks: a longer training
    engine_checkpoint._keep_length(schedule, head, 2)
    assert schedule.total_num_steps == 100
    with pytest.warns(UserWarning, match="on 2 data-parallel ranks, and has total_num_steps=100 on 1"):
        engine_checkpoint._keep_length(schedule, {"dp_world_size": 2}, 1)
