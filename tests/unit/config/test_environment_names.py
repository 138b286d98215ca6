"""Plugins and the launcher must mean the same variables: each one that a plugin reads is in the option table."""

import pytest

from accelerate.config import deepspeed, fsdp, megatron, values
from accelerate.config.options import OPTIONS

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
