"""What a program says wins over what the launcher exports, and what the launcher exports over the default of the table."""

import pytest

from accelerate import Accelerator
from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.handlers import GradientAccumulationPlugin, TorchDynamoPlugin
from accelerate.config.megatron import MegatronLMPlugin
from accelerate.config.options import BY_NAME
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState


def accelerator(read):
    def see(**given):
        AcceleratorState._reset_state()
        return read(Accelerator(**given))

    return see


def steps(**given):
    # The argument of the same name is below the environment, as upstream has it; the plugin is above.
    if given:
        given = {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=given["num_steps"])}
    return Accelerator(**given).gradient_accumulation_steps


def plugin(kind, read):
    return lambda **given: read(kind(**given))


def fsdp2(**given):
    return FullyShardedDataParallelPlugin(fsdp_version=2, **given)


# Option, argument in code, what a program says, what the launcher exports, and how to see what counts.
CASES = [
    ("mixed_precision", "mixed_precision", "no", "bf16", accelerator(lambda a: a.mixed_precision)),
    ("gradient_accumulation_steps", "num_steps", 3, 4, steps),
    (
        "dynamo_backend",
        "dynamo_backend",
        "eager",
        "aot_eager",
        accelerator(lambda a: a.state.dynamo_plugin.backend.value.lower()),
    ),
    ("dynamo_backend", "backend", "eager", "aot_eager", plugin(TorchDynamoPlugin, lambda p: p.backend.value.lower())),
    ("dynamo_mode", "mode", "max-autotune", "reduce-overhead", plugin(TorchDynamoPlugin, lambda p: p.mode)),
    ("dynamo_use_fullgraph", "fullgraph", False, True, plugin(TorchDynamoPlugin, lambda p: p.fullgraph)),
    ("dynamo_use_dynamic", "dynamic", False, True, plugin(TorchDynamoPlugin, lambda p: p.dynamic)),
    (
        "dynamo_use_regional_compilation",
        "use_regional_compilation",
        False,
        True,
        plugin(TorchDynamoPlugin, lambda p: p.use_regional_compilation),
    ),
    ("fsdp_version", "fsdp_version", 1, "2", plugin(FullyShardedDataParallelPlugin, lambda p: p.fsdp_version)),
    (
        "fsdp_sharding_strategy",
        "sharding_strategy",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        plugin(FullyShardedDataParallelPlugin, lambda p: p.sharding_strategy.name),
    ),
    (
        "fsdp_backward_prefetch",
        "backward_prefetch",
        "BACKWARD_POST",
        "BACKWARD_PRE",
        plugin(FullyShardedDataParallelPlugin, lambda p: p.backward_prefetch.name),
    ),
    (
        "fsdp_state_dict_type",
        "state_dict_type",
        "SHARDED_STATE_DICT",
        "FULL_STATE_DICT",
        plugin(FullyShardedDataParallelPlugin, lambda p: p.state_dict_type.name),
    ),
    (
        "fsdp_use_orig_params",
        "use_orig_params",
        False,
        "true",
        plugin(FullyShardedDataParallelPlugin, lambda p: p.use_orig_params),
    ),
    (
        "fsdp_forward_prefetch",
        "forward_prefetch",
        False,
        "true",
        plugin(FullyShardedDataParallelPlugin, lambda p: p.forward_prefetch),
    ),
    (
        "fsdp_activation_checkpointing",
        "activation_checkpointing",
        False,
        "true",
        plugin(FullyShardedDataParallelPlugin, lambda p: p.activation_checkpointing),
    ),
    (
        "fsdp_reshard_after_forward",
        "reshard_after_forward",
        True,
        "false",
        plugin(fsdp2, lambda p: p.reshard_after_forward),
    ),
    ("megatron_lm_tp_degree", "tp_degree", 2, 4, plugin(MegatronLMPlugin, lambda p: p.tp_degree)),
    ("megatron_lm_pp_degree", "pp_degree", 2, 4, plugin(MegatronLMPlugin, lambda p: p.pp_degree)),
    (
        "megatron_lm_gradient_clipping",
        "gradient_clipping",
        0.5,
        0.25,
        plugin(MegatronLMPlugin, lambda p: p.gradient_clipping),
    ),
    (
        "megatron_lm_num_micro_batches",
        "num_micro_batches",
        2,
        4,
        plugin(MegatronLMPlugin, lambda p: p.num_micro_batches),
    ),
    ("zero_stage", "zero_stage", 1, 3, plugin(DeepSpeedPlugin, lambda p: p.zero_stage)),
    ("gradient_clipping", "gradient_clipping", 0.5, 0.25, plugin(DeepSpeedPlugin, lambda p: p.gradient_clipping)),
    (
        "gradient_accumulation_steps",
        "gradient_accumulation_steps",
        3,
        4,
        plugin(DeepSpeedPlugin, lambda p: p.gradient_accumulation_steps),
    ),
    (
        "offload_optimizer_device",
        "offload_optimizer_device",
        "none",
        "cpu",
        plugin(DeepSpeedPlugin, lambda p: p.offload_optimizer_device),
    ),
    (
        "parallelism_config_dp_replicate_size",
        "dp_replicate_size",
        2,
        4,
        plugin(ParallelismConfig, lambda p: p.dp_replicate_size),
    ),
    ("parallelism_config_tp_size", "tp_size", 2, 4, plugin(ParallelismConfig, lambda p: p.tp_size)),
    ("parallelism_config_cp_size", "cp_size", 2, 4, plugin(ParallelismConfig, lambda p: p.cp_size)),
]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for option in BY_NAME.values():
        if option.env:
            monkeypatch.delenv(option.env, raising=False)


@pytest.mark.parametrize(
    ("name", "argument", "in_code", "exported", "see"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES]
)
def test_code_over_environment_over_default(monkeypatch, name, argument, in_code, exported, see):
    option = BY_NAME[name]
    assert see(**{argument: in_code}) == in_code
    for variable, text in option.encode(exported).items():
        monkeypatch.setenv(variable, text)
    assert see(**{argument: in_code}) == in_code
    assert option.parse(see()) == option.parse(exported)
