"""Comparisons of what `accelerate launch` reads, decides, exports and starts, and of `accelerate.launchers`."""

import argparse
import sys
from typing import Any

from accelerate.commands import launch
from interop.differential.core import Words, call, probe


def listed(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


PARSER = launch.launch_command_parser()
PLAIN = vars(PARSER.parse_args(["s.py"]))
OWN = {"numa_affinity", "dry_run", "func"}
PRECISIONS = ["no", "fp16", "bf16", "fp8", "FP16", "BF16", "fp32", "int8", ""]
BACKENDS = [
    *(
        "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
        "onnxrt",
    ),
    *(
        "tensorrt", "aot_torchxla_trace_once", "torhchxla_trace_once", "tvm", "INDUCTOR", "EAGER", "NO", "unknown",
        "",
    ),
]  # fmt: skip
FREE = ["x", "X Y", "ü", ""]
BOOLS = ["true", "false", "True", "FALSE", "1", "0", "yes", "no", "x", ""]
INTEGERS = ["0", "1", "2", "-1", "007", "1_0", "99999999999999999999", "1.0", "x", ""]
FLOATS = ["0", "1.5", "-1", "1e3", "nan", "inf", "x", ""]
OPTIONS = {
    "mixed_precision": PRECISIONS,
    "dynamo_backend": BACKENDS,
    "dynamo_mode": ["default", "reduce-overhead", "max-autotune", "DEFAULT", "x", ""],
    "fp8_backend": ["ao", "te", "msamp", "TE", "x", ""],
    "fp8_format": ["E4M3", "E5M2", "HYBRID", "hybrid", "x", ""],
    "fp8_amax_compute_algo": ["max", "most_recent", "MAX", "x", ""],
    "fp8_opt_level": ["O1", "O2", "O3", "o1", ""],
    "fp8_override_linear_precision": ["true,false,true", "(True, False, True)", "1,0,1", "true", "x", "", "True,True"],
    "fsdp_version": ["1", "2", "3", "", "one"],
    "parallelism_config_cp_backend": ["torch", "TORCH", "x", ""],
    "parallelism_config_sp_backend": ["deepspeed", "DEEPSPEED", "x", ""],
    **dict.fromkeys(
        listed(
            "num_processes num_machines num_cpu_threads_per_process machine_rank main_process_port max_restarts zero_stage "
            "gradient_accumulation_steps fsdp_min_num_params fp8_margin fp8_interval fp8_amax_history_len megatron_lm_tp_degree "
            "megatron_lm_pp_degree megatron_lm_num_micro_batches megatron_lm_decoder_last_pipeline_num_layers "
            "megatron_lm_recompute_num_layers megatron_lm_expert_model_parallel_size megatron_lm_context_parallel_size "
            "megatron_lm_expert_tensor_parallel_size parallelism_config_dp_replicate_size parallelism_config_dp_shard_size "
            "parallelism_config_tp_size parallelism_config_cp_size parallelism_config_sp_size"
        ),
        INTEGERS,
    ),
    **dict.fromkeys(
        listed(
            "monitor_interval gradient_clipping megatron_lm_gradient_clipping megatron_lm_attention_dropout "
            "megatron_lm_hidden_dropout"
        ),
        FLOATS,
    ),
    **dict.fromkeys(
        listed(
            "megatron_lm_use_custom_fsdp megatron_lm_no_load_optim megatron_lm_eod_mask_loss "
            "megatron_lm_overlap_cpu_optimizer_d2h_h2d megatron_lm_no_save_optim megatron_lm_optimizer_cpu_offload "
            "megatron_lm_use_precision_aware_optimizer parallelism_config_sp_seq_length_is_variable "
            "fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim"
        ),
        BOOLS,
    ),
    **dict.fromkeys(
        listed(
            "config_file gpu_ids main_process_ip tee log_dir role rdzv_backend rdzv_conf vm env main_training_function "
            "deepspeed_config_file offload_optimizer_device offload_param_device offload_optimizer_nvme_path "
            "offload_param_nvme_path zero3_init_flag zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter "
            "deepspeed_inclusion_filter deepspeed_multinode_launcher deepspeed_moe_layer_cls_names fsdp_offload_params "
            "fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap "
            "fsdp_backward_prefetch fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params "
            "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_activation_checkpointing "
            "fsdp_activation_checkpointing_offload megatron_lm_sequence_parallelism megatron_lm_recompute_activations "
            "megatron_lm_use_distributed_optimizer megatron_lm_recompute_granularity megatron_lm_recompute_method "
            "megatron_lm_attention_backend megatron_lm_attention_softmax_in_fp32 megatron_lm_calculate_per_token_loss "
            "megatron_lm_use_rotary_position_embeddings aws_access_key_id aws_secret_access_key mpirun_hostfile "
            "parallelism_config_cp_comm_strategy parallelism_config_sp_seq_length "
            "parallelism_config_sp_attn_implementation"
        ),
        FREE,
    ),
}


def parsed(*words: str) -> argparse.Namespace:
    """Return what the parser makes of a command line, without this package's own options."""
    args = PARSER.parse_args(list(words))
    for name in OWN:
        vars(args).pop(name, None)
    return args


def simple(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes in order, where 1 and True are the same, without what nobody but the launcher reads."""
    found = {k: attributes[k] for k in sorted(attributes) if k not in OWN}
    for name in ("fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim"):
        found[name] = bool(found[name])
    found["fp8_override_linear_precision"] = [bool(v) for v in found["fp8_override_linear_precision"]]
    found["nondefault"] = found.get("nondefault", set()) - {"vm", "env"}
    return found


def changed(args: argparse.Namespace) -> dict[str, Any]:
    """Return the attributes that a plain command line does not give."""
    now, plain = simple(vars(args)), simple(PLAIN)
    return {
        **{k: v for k, v in now.items() if plain.get(k, "<absent>") != v},
        **{k: "<absent>" for k in plain if k not in now},
    }


def options(given: str) -> dict[str, Any]:
    """Give a value as one word or as two, in one of the two spellings."""
    name, _, value = given.partition("=")
    words = [f"--{name}", value] if len(given) % 2 else [f"--{name.replace('_', '-')}={value}"]
    return changed(parsed(*words, "s.py"))


probe(
    "commands.launch:launch_command_parser",
    given=Words([f"{name}={value}" for name, values in OPTIONS.items() for value in values]),
)(options)


call(
    "commands.launch:clean_option", option=Words(["--a-b", "--a_b", "-a", "a-b", "", "--", "--A-B", "---x", "--a=b-c"])
)


@probe(
    "commands.launch:CustomHelpFormatter",
    line=[
        "launch", "launch --use_fsdp", "launch --use-deepspeed", "launch --tpu --help", "launch --use_megatron_lm",
        "launch --fsdp_version 2", "launch --use_fsdp --use_deepspeed", "launch --cpu",
    ],
)  # fmt: skip
def help_formatter(line: str) -> Any:
    """Show which of a parser's options the help has, by group."""
    sys.argv[:] = ["accelerate", *line.split()]
    text = PARSER.format_help()
    for word in ("--fsdp_version", "--zero_stage", "--tpu_use_sudo", "--megatron_lm_tp_degree", "--num_processes", "--cpu", "--fp8_margin", "--aws_access_key_id"):  # fmt: skip
        yield word, any(f" {word}" in row for row in text[text.index("training_script") :].splitlines())
