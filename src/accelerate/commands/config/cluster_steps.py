"""The questions about engines, numerics and layouts, as tables: which options, in which order, and when each matters."""

import json
import os
from collections.abc import Mapping
from typing import Any

from accelerate.commands.config import words
from accelerate.commands.config.interview import TRUE_OR_FALSE, Step, at_least, fraction, positive, whole


def is_file(value: Any, values: Mapping[str, Any]) -> None:
    """Refuse a path at which there is no file."""
    if not os.path.isfile(os.path.expanduser(value)):
        raise ValueError(f"There is no file {value!r} (seen from {os.getcwd()}).")


def is_json(value: Any, values: Mapping[str, Any]) -> None:
    """Refuse a path at which there is no JSON file."""
    is_file(value, values)
    try:
        with open(value, encoding="utf-8") as stream:
            json.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{value!r} is no JSON file: {error}") from None


def _stage(at: int) -> Any:
    return lambda values: (values.get("zero_stage") or 0) >= at


def _has(name: str, value: Any) -> Any:
    return lambda values: values.get(name) == value


_several_machines = lambda values: values.get("num_machines", 1) > 1  # noqa: E731
_logs_in = lambda values: _several_machines(values) and values["deepspeed_multinode_launcher"] != "standard"  # noqa: E731

DEEPSPEED_FILE = (Step("deepspeed_config_file", check=is_json), Step("zero3_init_flag", "false"))
DEEPSPEED = (
    Step("zero_stage", 2),
    Step("offload_optimizer_device", "none", when=_stage(1)),
    Step("offload_param_device", "none", when=_stage(3)),
    Step("offload_optimizer_nvme_path", "/nvme", when=_has("offload_optimizer_device", "nvme")),
    Step("offload_param_nvme_path", "/nvme", when=_has("offload_param_device", "nvme")),
    Step("gradient_accumulation_steps", 1, check=at_least(1)),
    Step("gradient_clipping", check=positive, optional=True),
    Step("zero3_init_flag", "false", when=_stage(3)),
    Step("zero3_save_16bit_model", "false", when=_stage(3)),
    Step("deepspeed_moe_layer_cls_names", optional=True),
)
DEEPSPEED_MACHINES = (
    Step("deepspeed_multinode_launcher", "pdsh", when=_several_machines),
    Step("deepspeed_hostfile", when=_logs_in, check=is_file, optional=True),
    Step("deepspeed_exclusion_filter", when=_logs_in, optional=True),
    Step(
        "deepspeed_inclusion_filter",
        when=lambda values: _logs_in(values) and "deepspeed_exclusion_filter" not in values,
        optional=True,
    ),
)

_first = _has("fsdp_version", "1")
_second = _has("fsdp_version", "2")


def _loading_needs_sync(values: Mapping[str, Any]) -> bool:
    # What only the first process loads must reach the others.
    return _first(values) and values.get("fsdp_cpu_ram_efficient_loading") != "true"


FSDP = (
    Step("fsdp_version"),
    Step("fsdp_sharding_strategy", when=_first),
    Step("fsdp_reshard_after_forward", "true", when=_second, choices=TRUE_OR_FALSE),
    Step("fsdp_offload_params"),
    Step("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    Step(
        "fsdp_transformer_layer_cls_to_wrap",
        when=_has("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        optional=True,
    ),
    Step("fsdp_min_num_params", when=_has("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"), check=at_least(1)),
    Step("fsdp_backward_prefetch", when=_first),
    Step("fsdp_state_dict_type", "SHARDED_STATE_DICT", when=_first),
    Step("fsdp_state_dict_type", "SHARDED_STATE_DICT", when=_second, choices=words.FSDP2_STATE_DICTS),
    Step("fsdp_forward_prefetch", when=_first),
    Step("fsdp_use_orig_params", when=_first),
    Step("fsdp_cpu_ram_efficient_loading"),
    Step("fsdp_sync_module_states", when=_loading_needs_sync),
    Step("fsdp_activation_checkpointing"),
    Step(
        "fsdp_activation_checkpointing_offload",
        when=lambda values: _second(values) and values["fsdp_activation_checkpointing"] == "true",
    ),
)

_size = {"default": 1, "check": at_least(1)}
_split = lambda values: values.get("parallelism_config_cp_size", 1) > 1  # noqa: E731
_ulysses = lambda values: values.get("parallelism_config_sp_size", 1) > 1  # noqa: E731

PARALLELISM_FSDP = (
    Step("parallelism_config_dp_replicate_size", **_size),
    Step("parallelism_config_dp_shard_size", **_size),
    Step("parallelism_config_tp_size", **_size),
    Step("parallelism_config_cp_size", **_size),
    Step("parallelism_config_cp_comm_strategy", when=_split),
)
PARALLELISM_DEEPSPEED = (
    Step("parallelism_config_dp_replicate_size", **_size),
    Step("parallelism_config_sp_size", **_size),
    Step("parallelism_config_sp_backend", when=_ulysses),
    Step("parallelism_config_sp_seq_length_is_variable", when=_ulysses),
    Step(
        "parallelism_config_sp_seq_length",
        when=lambda v: _ulysses(v) and not v["parallelism_config_sp_seq_length_is_variable"],
        check=whole,
    ),
    Step("parallelism_config_sp_attn_implementation", when=_ulysses),
)


def _m(name: str, *rest: Any, **more: Any) -> Step:
    return Step(f"megatron_lm_{name}", *rest, **more)


MEGATRON = (
    _m("tp_degree", check=at_least(1)),
    _m("sequence_parallelism", "true", when=lambda v: v["megatron_lm_tp_degree"] > 1),
    _m("pp_degree", check=at_least(1)),
    _m("num_micro_batches", 1, when=lambda v: v["megatron_lm_pp_degree"] > 1, check=at_least(1)),
    _m("recompute_activations", "true"),
    _m("use_distributed_optimizer", "true"),
    _m("gradient_clipping", check=at_least(0)),
)
MEGATRON_MORE = (
    _m("recompute_granularity", when=lambda v: v["megatron_lm_recompute_activations"] == "true"),
    _m("recompute_method", when=_has("megatron_lm_recompute_granularity", "full")),
    _m("recompute_num_layers", 1, when=_has("megatron_lm_recompute_granularity", "full"), check=at_least(1)),
    _m("attention_backend", "auto"),
    _m("attention_dropout", optional=True, check=fraction),
    _m("hidden_dropout", optional=True, check=fraction),
    _m("attention_softmax_in_fp32", "false"),
    _m("use_rotary_position_embeddings", "false"),
    _m("calculate_per_token_loss", "false"),
    _m("eod_mask_loss"),
    _m("context_parallel_size", 1, check=at_least(1)),
    _m("expert_model_parallel_size", 1, check=at_least(1)),
    _m("expert_tensor_parallel_size", 1, check=at_least(1)),
    _m("decoder_last_pipeline_num_layers", optional=True, check=at_least(1)),
    _m("use_custom_fsdp"),
    _m("optimizer_cpu_offload"),
    _m("overlap_cpu_optimizer_d2h_h2d", when=_has("megatron_lm_optimizer_cpu_offload", True)),
    _m("use_precision_aware_optimizer"),
    _m("no_load_optim"),
    _m("no_save_optim"),
)

DYNAMO_MORE = (
    Step("dynamo_mode"),
    Step("dynamo_use_fullgraph"),
    Step("dynamo_use_dynamic"),
    Step("dynamo_use_regional_compilation"),
)

_te = _has("fp8_backend", "te")
_ao = _has("fp8_backend", "ao")
FP8 = (
    Step("fp8_backend"),
    Step("fp8_use_autocast_during_eval", when=_te),
    Step("fp8_margin", when=_te, check=at_least(0)),
    Step("fp8_interval", when=_te, check=at_least(1)),
    Step("fp8_format", when=_te),
    Step("fp8_amax_history_len", when=_te, check=at_least(1)),
    Step("fp8_amax_compute_algo", when=_te),
    Step("fp8_override_linear_precision", when=_te),
    Step("fp8_opt_level", when=_has("fp8_backend", "msamp")),
    Step("fp8_enable_fsdp_float8_all_gather", when=lambda v: _ao(v) and _second(v)),
    Step("fp8_pad_inner_dim", when=_ao),
)

TPU_POD = (
    Step("tpu_name"),
    Step("tpu_zone"),
    Step("tpu_use_sudo"),
    Step("command_file", check=is_file, optional=True),
    Step("commands", when=lambda values: "command_file" not in values),
    Step("vm"),
    Step("env"),
)
