"""Construction: what is refused leaves no state behind, and nothing that is asked for is ignored in silence."""

import logging

import pytest

from accelerate import Accelerator, ParallelismConfig
from accelerate.process import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration, TorchTensorParallelPlugin


def test_a_second_project_folder_is_named():
    with pytest.warns(UserWarning, match="'b' is not used.*'a'"):
        Accelerator(cpu=True, project_dir="b", project_config=ProjectConfiguration(project_dir="a"))


def test_the_superseded_tensor_parallel_plugin_becomes_a_mesh():
    with pytest.warns(FutureWarning, match="ParallelismConfig.tp_size=2"):
        accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    assert accelerator.parallelism_config.tp_size == 2
    AcceleratorState._reset_state()
    with pytest.warns(FutureWarning, match="ParallelismConfig.tp_size=1"):
        alone = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin())
    assert alone.parallelism_config == ParallelismConfig() and alone.tensor_parallel_rank == 0
    plugin, mesh = TorchTensorParallelPlugin(tp_size=2), ParallelismConfig(tp_size=4)
    with pytest.raises(ValueError, match="tp_size=2 and parallelism_config.tp_size=4 disagree"):
        Accelerator(cpu=True, torch_tp_plugin=plugin, parallelism_config=mesh)


def test_settings_that_come_too_late_are_named(caplog):
    Accelerator(cpu=True)
    with caplog.at_level(logging.WARNING):
        Accelerator(cpu=True)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        Accelerator(cpu=True, dynamo_backend="eager", parallelism_config=ParallelismConfig())
    assert [record.args[0] for record in caplog.records] == ["dynamo_plugin", "parallelism_config"]


def test_the_cpu_is_not_ignored_when_the_process_has_another_device(monkeypatch):
    import torch

    PartialState().device = torch.device("cuda", 0)
    with pytest.raises(ValueError, match="cpu=True cannot take effect.*cuda:0"):
        Accelerator(cpu=True)


def test_what_is_no_configuration_is_refused_and_no_plugins_are_none():
    with pytest.raises(ValueError, match="gradient_accumulation_steps=0 is not a positive integer"):
        Accelerator(cpu=True, gradient_accumulation_steps=0)
    with pytest.raises(TypeError, match="parallelism_config='tp' is a str; pass a ParallelismConfig"):
        Accelerator(cpu=True, parallelism_config="tp")
    assert Accelerator(cpu=True, deepspeed_plugins={}).state.deepspeed_plugins is None
