"""What a program says wins over what the launcher exports, and what the launcher exports over the default of the table."""

import enum

import pytest

from accelerate import Accelerator
from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.handlers import GradientAccumulationPlugin, TorchDynamoPlugin
from accelerate.config.megatron import MegatronLMPlugin
from accelerate.config.options import BY_NAME
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState


def accelerator(**given):
    AcceleratorState._reset_state()
    return Accelerator(**given)


def steps(**given):
    # The argument of the same name is below the environment, as upstream has it; the plugin is above.
    return accelerator(**({"gradient_accumulation_plugin": GradientAccumulationPlugin(**given)} if given else {}))


def compiler(**given):
    return accelerator(**given).state.dynamo_plugin


def fsdp2(**given):
    return FullyShardedDataParallelPlugin(fsdp_version=2, **given)


FSDP, DYNAMO, MEGATRON = FullyShardedDataParallelPlugin, TorchDynamoPlugin, MegatronLMPlugin
# Option, what takes the argument, the argument, what a program says, what the launcher exports; the attribute is called like the
# argument unless it is given.
CASES = [
    ("mixed_precision", accelerator, "mixed_precision", "no", "bf16"),
    ("gradient_accumulation_steps", steps, "num_steps", 3, 4, "gradient_accumulation_steps"),
    ("dynamo_backend", compiler, "dynamo_backend", "eager", "aot_eager", "backend"),
    ("dynamo_mode", DYNAMO, "mode", "max-autotune", "reduce-overhead"),
    ("dynamo_use_dynamic", DYNAMO, "dynamic", False, True),
    ("fsdp_version", FSDP, "fsdp_version", 1, "2"),
    ("fsdp_sharding_strategy", FSDP, "sharding_strategy", "SHARD_GRAD_OP", "NO_SHARD"),
    ("fsdp_state_dict_type", FSDP, "state_dict_type", "SHARDED_STATE_DICT", "FULL_STATE_DICT"),
    ("fsdp_use_orig_params", FSDP, "use_orig_params", False, "true"),
    ("fsdp_reshard_after_forward", fsdp2, "reshard_after_forward", True, "false"),
    ("megatron_lm_tp_degree", MEGATRON, "tp_degree", 2, 4),
    ("megatron_lm_gradient_clipping", MEGATRON, "gradient_clipping", 0.5, 0.25),
    ("megatron_lm_sequence_parallelism", MEGATRON, "sequence_parallelism", False, "true"),
    ("megatron_lm_recompute_granularity", MEGATRON, "recompute_granularity", "full", "selective"),
    ("zero_stage", DeepSpeedPlugin, "zero_stage", 1, 3),
    ("gradient_clipping", DeepSpeedPlugin, "gradient_clipping", 0.5, 0.25),
    ("gradient_accumulation_steps", DeepSpeedPlugin, "gradient_accumulation_steps", 3, 4),
    ("parallelism_config_tp_size", ParallelismConfig, "tp_size", 2, 4),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES])
def test_code_over_environment_over_default(monkeypatch, case):
    name, takes, argument, in_code, exported, *attribute = case

    def seen(**given):
        value = getattr(takes(**given), *attribute or [argument])
        if isinstance(value, enum.Enum):
            return value.value.lower() if takes in (DYNAMO, compiler) else value.name
        return value

    option = BY_NAME[name]
    assert seen(**{argument: in_code}) == in_code
    for variable, text in option.encode(exported).items():
        monkeypatch.setenv(variable, text)
    assert seen(**{argument: in_code}) == in_code
    assert option.parse(seen()) == option.parse(exported)
