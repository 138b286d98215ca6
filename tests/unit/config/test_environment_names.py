"""A variable that is empty says nothing, wherever it is read."""

import pytest

from accelerate import Accelerator, ParallelismConfig
from accelerate.config import deepspeed, fsdp, handlers, low_bit, megatron, parallel
from accelerate.config.options import OPTIONS
from accelerate.logging import get_logger

EXPORTED = {name for option in OPTIONS for name in (option.env, *option.env_names) if name}


@pytest.mark.parametrize("blank", ["", "  "])
def test_an_empty_variable_is_as_if_it_were_not_set(monkeypatch, blank):
    build = (
        fsdp.FullyShardedDataParallelPlugin, deepspeed.DeepSpeedPlugin, megatron.MegatronLMPlugin, ParallelismConfig,
        handlers.TorchDynamoPlugin, low_bit.MSAMPRecipeKwargs, parallel.TorchContextParallelConfig, parallel.DeepSpeedSequenceParallelConfig,
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
