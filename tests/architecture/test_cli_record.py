"""The command line against the record of 1.15.0: every flag, where it is listed, and a reference that is up to date."""

import argparse
import json
import pathlib
import subprocess
import sys

import pytest

from accelerate.commands import accelerate_cli
from accelerate.commands.launch import launch_command_parser
from architecture import source

RECORD = pathlib.Path(__file__).with_name("record") / "cli-1.15.0.json"
RECORDED = json.loads(RECORD.read_text("utf-8"))["commands"]
# The headings of `accelerate launch --help` as 1.15.0 prints them, with the arguments below each.
GROUPS = {
    "options": "config_file quiet module no_python debug",
    "Hardware Selection Arguments": "cpu multi_gpu tpu",
    "Resource Selection Arguments": (
        "mixed_precision num_processes num_machines num_cpu_threads_per_process enable_cpu_affinity dynamo_backend "
        "dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation"
    ),
    "Training Paradigm Arguments": "use_deepspeed use_fsdp use_parallelism_config use_megatron_lm",
    "Distributed GPUs": (
        "gpu_ids same_network machine_rank main_process_ip main_process_port tee log_dir role rdzv_backend rdzv_conf "
        "max_restarts monitor_interval"
    ),
    "TPU": "tpu_use_cluster tpu_use_sudo vm env main_training_function downcast_bf16",
    "DeepSpeed Arguments": (
        "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device offload_optimizer_nvme_path "
        "offload_param_nvme_path gradient_accumulation_steps gradient_clipping zero3_init_flag zero3_save_16bit_model "
        "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher "
        "deepspeed_moe_layer_cls_names"
    ),
    "FSDP Arguments": (
        "fsdp_version fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy fsdp_reshard_after_forward "
        "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch fsdp_state_dict_type "
        "fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading fsdp_sync_module_states "
        "fsdp_activation_checkpointing fsdp_activation_checkpointing_offload"
    ),
    "Megatron-LM Arguments": (
        "megatron_lm_tp_degree megatron_lm_use_custom_fsdp megatron_lm_no_load_optim megatron_lm_eod_mask_loss "
        "megatron_lm_overlap_cpu_optimizer_d2h_h2d megatron_lm_no_save_optim megatron_lm_optimizer_cpu_offload "
        "megatron_lm_use_precision_aware_optimizer megatron_lm_decoder_last_pipeline_num_layers megatron_lm_pp_degree "
        "megatron_lm_num_micro_batches megatron_lm_sequence_parallelism megatron_lm_recompute_activations "
        "megatron_lm_use_distributed_optimizer megatron_lm_gradient_clipping megatron_lm_recompute_granularity "
        "megatron_lm_recompute_method megatron_lm_recompute_num_layers megatron_lm_attention_backend "
        "megatron_lm_expert_model_parallel_size megatron_lm_context_parallel_size megatron_lm_attention_dropout "
        "megatron_lm_hidden_dropout megatron_lm_attention_softmax_in_fp32 megatron_lm_expert_tensor_parallel_size "
        "megatron_lm_calculate_per_token_loss megatron_lm_use_rotary_position_embeddings"
    ),
    "FP8 Arguments": (
        "fp8_backend fp8_use_autocast_during_eval fp8_margin fp8_interval fp8_format fp8_amax_history_len "
        "fp8_amax_compute_algo fp8_override_linear_precision fp8_opt_level fp8_enable_fsdp_float8_all_gather "
        "fp8_pad_inner_dim"
    ),
    "AWS Arguments": "aws_access_key_id aws_secret_access_key",
    "MPI Arguments": "mpirun_hostfile",
    "ParallelismConfig Arguments": (
        "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size parallelism_config_tp_size "
        "parallelism_config_cp_size parallelism_config_cp_backend parallelism_config_cp_comm_strategy "
        "parallelism_config_sp_size parallelism_config_sp_backend parallelism_config_sp_seq_length "
        "parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation"
    ),
}


def parser_of(name, sub=None):
    parser = accelerate_cli.parser_of(name)
    if sub is None:
        return parser
    return next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices[sub]


def test_groups_of_launch():
    ours = {}
    for group in launch_command_parser()._action_groups:
        for action in group._group_actions:
            ours.setdefault(action.dest, group.title)
    recorded = {dest: title for title, dests in GROUPS.items() for dest in dests.split()}
    assert {dest: ours.get(dest) for dest in recorded} == recorded
    assert len(recorded) >= 120
    assert {argument["dest"] for argument in RECORDED["launch"]["arguments"] if argument["options"]} == set(recorded)


def recorded_commands():
    for name, content in RECORDED.items():
        yield name, None, content["arguments"]
        for sub, inner in content.get("subcommands", {}).items():
            yield name, sub, inner["arguments"]


@pytest.mark.parametrize(("name", "sub", "arguments"), list(recorded_commands()))
def test_recorded_arguments(name, sub, arguments):
    parser = parser_of(name, sub)
    for recorded in arguments:
        what = recorded["options"] or recorded["dest"]
        actions = [action for action in parser._actions if action.dest == recorded["dest"]]
        action = next((a for a in actions if set(recorded["options"]) <= set(a.option_strings)), None)
        assert action is not None, what
        # A constant that is no is how a flag says no.
        kind = {"StoreConstAction": "StoreFalseAction"}.get(recorded["action"], recorded["action"])
        assert type(action).__name__ == f"_{kind}", what
        assert (action.nargs, action.required) == (recorded["nargs"], recorded["required"]), what
        # Further choices are allowed; where there were none, everything is still taken.
        assert set(recorded["choices"] or ()) <= set(action.choices or ()), what
        assert recorded["choices"] or not action.choices, what
        # The record holds the default of the negation, and a path of the machine it was made on.
        if (
            recorded["options"]
            and recorded["options"] != ["--no_tpu_cluster", "--no-tpu-cluster"]
            and sub != "default"
        ):
            # A truth value that the record holds as text is one here.
            default = recorded["default"]
            assert repr(actions[0].default) in (default, default.strip("'").title()), what
        if recorded["type"] in ("int", "float"):
            assert action.type("7") == 7, what
            with pytest.raises((ValueError, argparse.ArgumentTypeError)):
                action.type("many")


def test_every_recorded_command():
    names = set(accelerate_cli.commands())
    assert set(RECORDED) <= names
    assert names - set(RECORDED) == {"checkpoint", "diagnose", "plan", "stacks"}  # what only we have


def test_reference_is_up_to_date():
    """`python tools/cli_reference.py` writes docs/reference/cli.md; run it after a change of the command line."""
    tool = source.ROOT / "tools" / "cli_reference.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_stale_reference_is_noticed(tmp_path):
    tool = source.ROOT / "tools" / "cli_reference.py"
    page = tmp_path / "new" / "cli.md"
    command = [sys.executable, str(tool), "--out", str(page)]
    assert subprocess.run([*command, "--check"], capture_output=True, timeout=120).returncode == 1
    assert subprocess.run(command, timeout=120).returncode == 0
    page.write_text(page.read_text("utf-8").replace("--num_processes", "--processes"), "utf-8")
    assert subprocess.run([*command, "--check"], capture_output=True, timeout=120).returncode == 1
