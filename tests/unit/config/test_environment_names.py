"""Plugins and the launcher must mean the same variables: each one that a plugin reads is in the option table."""

import pytest

from accelerate import Accelerator, ParallelismConfig
from accelerate.config import deepspeed, dynamo, fp8, fsdp, megatron, parallel, values
from accelerate.config.options import OPTIONS
from accelerate.logging import get_logger

EXPORTED = {name for option in OPTIONS for name in (option.env, *option.env_names) if name}


@pytest.fixture
def read(monkeypatch):
    names = set()

    def recorded(given, variable, *rest):
        names.add(variable)
        return values.setting(given, variable, *rest)

    for module in (fsdp, deepspeed, megatron):
        monkeypatch.setattr(module, "setting", recorded)
    return names


def test_fsdp(read):
    fsdp.FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    fsdp.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap")
    assert {"FSDP_VERSION", "FSDP_MIN_NUM_PARAMS", "FSDP_TRANSFORMER_CLS_TO_WRAP"} < read
    assert read - EXPORTED <= {"FSDP_IGNORED_MODULES"}  # which only a user sets


def test_deepspeed(read):
    deepspeed.DeepSpeedPlugin().set_moe_leaf_modules(None)
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE" in read
    assert read <= EXPORTED


def test_megatron(read):
    megatron.MegatronLMPlugin()
    assert "MEGATRON_LM_TP_DEGREE" in read
    assert read <= EXPORTED


def test_parallelism():
    sizes = {f"PARALLELISM_CONFIG_{axis}_SIZE" for axis in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")}
    assert sizes <= EXPORTED


@pytest.mark.parametrize("blank", ["", "  "])
def test_an_empty_variable_is_as_if_it_were_not_set(monkeypatch, blank):
    build = (
        fsdp.FullyShardedDataParallelPlugin, deepspeed.DeepSpeedPlugin, megatron.MegatronLMPlugin, ParallelismConfig,
        dynamo.TorchDynamoPlugin, fp8.MSAMPRecipeKwargs, parallel.TorchContextParallelConfig, parallel.DeepSpeedSequenceParallelConfig,
    )  # fmt: skip

    def fields():
        return [{name: value for name, value in vars(kind()).items() if name != "hf_ds_config"} for kind in build]

    usual = fields()
    for name in {*EXPORTED, "ACCELERATE_LOG_LEVEL", "ACCELERATE_TORCH_DEVICE", "FORK_LAUNCHED"}:
        monkeypatch.setenv(name, blank)
    assert fields() == usual
    accelerator = Accelerator()
    assert accelerator.distributed_type == "NO" and accelerator.parallelism_config is None
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 1)
    assert get_logger("blank").logger.level == 0
