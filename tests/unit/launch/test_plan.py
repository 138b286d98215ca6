"""A plan as it is shown and as workers get it: sources, variables, and every flag of sharding and parallelism up to its field."""

import operator
import os

import pytest
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap

from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.options import of_feature
from accelerate.launch import runners
from accelerate.launch.plan import exports, worker_environment
from accelerate.launch.resolve import resolve
from accelerate.parallelism_config import ParallelismConfig


def test_options_of_features_that_are_off_stay_away(plan):
    off = exports(plan("--zero_stage 2 --fsdp_version 2 --gradient_accumulation_steps 2").settings)
    assert off == exports(plan("").settings) and off["ACCELERATE_MIXED_PRECISION"] == "no"
    engine = plan("--use_deepspeed --gradient_accumulation_steps 2")
    assert exports(engine.settings)["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "2"
    by_hand = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "5"}
    other = worker_environment(plan("--gradient_accumulation_steps 2"), by_hand)
    assert other["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "5"


def test_selected_gpus(plan, gpus):
    gpus(4)
    given = worker_environment(plan("--gpu_ids 3,1"), {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "0"})
    assert (given["CUDA_VISIBLE_DEVICES"], given["HOME"]) == ("3,1", "/h")
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(plan("--gpu_ids all"), {})
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(plan("--cpu --gpu_ids 1"), {})


# option, its word on the command line, field, value, and what it needs beside it to be read
FSDP_FLAGS = [
    ("version", "1", "fsdp_version", 1, ""),
    ("version", "2", "fsdp_version", 2, ""),
    ("offload_params", "true", "cpu_offload", fsdp.CPUOffload(offload_params=True), ""),
    ("min_num_params", "7", "min_num_params", 7, "--fsdp_auto_wrap_policy SIZE_BASED_WRAP"),
    ("sharding_strategy", "SHARD_GRAD_OP", "sharding_strategy", fsdp.ShardingStrategy.SHARD_GRAD_OP, ""),
    ("sharding_strategy", "HYBRID_SHARD_ZERO2", "sharding_strategy", fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2, ""),
    ("reshard_after_forward", "false", "reshard_after_forward", False, "--fsdp_version 2"),
    ("auto_wrap_policy", "SIZE_BASED_WRAP", "auto_wrap_policy", wrap.size_based_auto_wrap_policy, ""),
    ("transformer_layer_cls_to_wrap", "A,B", "transformer_cls_names_to_wrap", ["A", "B"],
     "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"),
    ("backward_prefetch", "BACKWARD_POST", "backward_prefetch", fsdp.BackwardPrefetch.BACKWARD_POST, ""),
    ("state_dict_type", "SHARDED_STATE_DICT", "state_dict_type", fsdp.StateDictType.SHARDED_STATE_DICT, ""),
    ("forward_prefetch", "true", "forward_prefetch", True, ""),
    ("use_orig_params", "false", "use_orig_params", False, ""),
    ("cpu_ram_efficient_loading", "false", "cpu_ram_efficient_loading", False, ""),
    ("sync_module_states", "true", "sync_module_states", True, ""),
    ("activation_checkpointing", "true", "activation_checkpointing", True, ""),
    ("activation_checkpointing_offload", "true", "activation_checkpointing_offload", True,
     "--fsdp_activation_checkpointing true"),
]  # fmt: skip
PARALLELISM_FLAGS = [
    ("dp_replicate_size", "2", "dp_replicate_size", 2, {"dp_shard_size": 2}),
    ("dp_shard_size", "2", "dp_shard_size", 2, {}),
    ("tp_size", "2", "tp_size", 2, {}),
    ("cp_size", "2", "cp_size", 2, {}),
    ("sp_size", "2", "sp_size", 2, {}),
    ("cp_backend", "torch", "cp_backend", "torch", {}),
    ("cp_comm_strategy", "alltoall", "cp_handler.cp_comm_strategy", "alltoall", {"cp_size": 2}),
    ("sp_backend", "deepspeed", "sp_backend", "deepspeed", {}),
    ("sp_seq_length", "128", "sp_handler.sp_seq_length", 128, {"sp_size": 2, "sp_seq_length_is_variable": "false"}),
    ("sp_seq_length_is_variable", "false", "sp_handler.sp_seq_length_is_variable", False, {"sp_size": 2, "sp_seq_length": 64}),
    ("sp_attn_implementation", "sdpa", "sp_handler.sp_attn_implementation", "sdpa", {"sp_size": 2}),
]  # fmt: skip


@pytest.fixture
def worker(plan, monkeypatch):
    """Put on, in this process, the variables that a launch gives to its workers."""

    def become(line):
        for name, value in worker_environment(plan(f"--cpu {line}"), {}).items():
            monkeypatch.setenv(name, value)

    return become


@pytest.mark.parametrize(("option", "word", "field", "value", "beside"), FSDP_FLAGS)
def test_fsdp_flags_reach_the_plugin(worker, option, word, field, value, beside):
    worker(f"--use_fsdp {beside} --fsdp_{option} {word}")
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert getattr(FullyShardedDataParallelPlugin(), field) == value


def test_offloading_in_version_2(worker):
    worker("--use_fsdp --fsdp_version 2 --fsdp_offload_params true")
    assert isinstance(FullyShardedDataParallelPlugin().cpu_offload, fsdp.CPUOffloadPolicy)


@pytest.mark.parametrize(("option", "word", "field", "value", "beside"), PARALLELISM_FLAGS)
def test_parallelism_flags_reach_the_configuration(worker, option, word, field, value, beside):
    given = {option: word, **beside}
    total = 2 ** len([name for name in given if name.endswith("_size")])
    flags = " ".join(f"--parallelism_config_{name} {text}" for name, text in given.items())
    worker(f"--num_processes {total} --use_parallelism_config {flags}")
    assert operator.attrgetter(field)(ParallelismConfig()) == value


def test_every_flag_is_checked():
    assert {f"fsdp_{row[0]}" for row in FSDP_FLAGS} == {option.name for option in of_feature("fsdp")} - {"use_fsdp"}
    named = {f"parallelism_config_{row[0]}" for row in PARALLELISM_FLAGS}
    assert named == {option.name for option in of_feature("parallelism")}


@pytest.fixture
def lines(plan):
    return lambda line, environ: runners.describe(plan(line, environ), environ).splitlines()


def row(lines, name):
    return next(line.split(None, 2)[1:] for line in lines if line.startswith(f"{name} "))


def test_every_value_has_its_source(lines, monkeypatch):
    """Those of files are in tests/fixtures/dry_run."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    told = lines("--cpu --debug", {"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert row(told, "mixed_precision") == ["bf16", "environment variable ACCELERATE_MIXED_PRECISION"]
    assert row(told, "debug") == ["yes", "command line"]


def test_arguments_are_quoted_and_secrets_hidden(parse, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    args = parse("--cpu --num_processes 2 train.py")
    args.training_script_args = ["a b", "$HOME", "--hub_token", "hf_very_secret"]
    told = runners.describe(resolve(args), {})
    assert "train.py 'a b' '$HOME' --hub_token '(hidden)'" in told
    assert "hf_very_secret" not in told and "HF_TOKEN='(hidden)'" in told


def test_secrets_within_settings_are_hidden_and_switches_with_such_names_are_not(lines, place):
    (place / "c.yaml").write_text(
        "distributed_type: 'NO'\ntpu_env: [HF_TOKEN=hunter2, A=1]\ncommands: ['git clone https://me:hunter2@host/x']\n"
    )
    text = "\n".join(lines("--cpu --config_file c.yaml", {}))
    assert "hunter" not in text and "['HF_TOKEN=(hidden)', 'A=1']" in text
    told = lines("--dry_run --use_megatron_lm --megatron_lm_calculate_per_token_loss true", {})
    assert row(told, "megatron_lm_calculate_per_token_loss") == ["true", "command line"]
    assert "  MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS=true" in told
    assert any("Megatron-LM" in line and "not available" in line for line in told if line.startswith("note: "))
