"""What workers get: the variables of a plan, and every flag of sharding and parallelism on its way to the field that it sets."""

import os
import re

import pytest
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap

from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.options import of_feature
from accelerate.launch.plan import exports, worker_environment
from accelerate.parallelism_config import ParallelismConfig

ALWAYS = {
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "False",
}


def test_options_of_features_that_are_off_stay_away(plan):
    assert exports(plan("--zero_stage 2 --fsdp_version 2 --gradient_accumulation_steps 2").settings) == ALWAYS
    engine = plan("--use_deepspeed --gradient_accumulation_steps 2")
    assert exports(engine.settings)["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "2"
    other = plan("--gradient_accumulation_steps 2")
    assert other.notes == ("--gradient_accumulation_steps has no effect without --use_deepspeed.",)
    by_hand = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "5"}
    assert worker_environment(other, by_hand)["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "5"


def test_selected_gpus(plan, gpus):
    gpus(4)
    told = worker_environment(plan("--gpu_ids 3,1"), {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "0"})
    assert (told["CUDA_VISIBLE_DEVICES"], told["HOME"]) == ("3,1", "/h")
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(plan("--gpu_ids all"), {})
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(plan("--cpu --gpu_ids 1"), {})


# option, its words on the command line, field, value; for each version that reads it
FSDP_FLAGS = [
    ("fsdp_version", "1", "fsdp_version", 1),
    ("fsdp_version", "2", "fsdp_version", 2),
    ("fsdp_offload_params", "true", "cpu_offload", fsdp.CPUOffload(offload_params=True)),
    ("fsdp_min_num_params", "7", "min_num_params", 7),
    ("fsdp_sharding_strategy", "SHARD_GRAD_OP", "sharding_strategy", fsdp.ShardingStrategy.SHARD_GRAD_OP),
    ("fsdp_sharding_strategy", "HYBRID_SHARD_ZERO2", "sharding_strategy", fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2),
    ("fsdp_reshard_after_forward", "false", "reshard_after_forward", False),
    ("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", "auto_wrap_policy", wrap.size_based_auto_wrap_policy),
    ("fsdp_transformer_layer_cls_to_wrap", "A,B", "transformer_cls_names_to_wrap", ["A", "B"]),
    ("fsdp_backward_prefetch", "BACKWARD_POST", "backward_prefetch", fsdp.BackwardPrefetch.BACKWARD_POST),
    ("fsdp_state_dict_type", "SHARDED_STATE_DICT", "state_dict_type", fsdp.StateDictType.SHARDED_STATE_DICT),
    ("fsdp_forward_prefetch", "true", "forward_prefetch", True),
    ("fsdp_use_orig_params", "false", "use_orig_params", False),
    ("fsdp_use_orig_params", "true", "use_orig_params", True),
    ("fsdp_cpu_ram_efficient_loading", "false", "cpu_ram_efficient_loading", False),
    ("fsdp_cpu_ram_efficient_loading", "true", "cpu_ram_efficient_loading", True),
    ("fsdp_sync_module_states", "true", "sync_module_states", True),
    ("fsdp_activation_checkpointing", "true", "activation_checkpointing", True),
    ("fsdp_activation_checkpointing_offload", "true", "activation_checkpointing_offload", True),
]
# What an option needs beside it to be read.
BESIDE = {
    "fsdp_min_num_params": "--fsdp_auto_wrap_policy SIZE_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP",
    "fsdp_reshard_after_forward": "--fsdp_version 2",
    "fsdp_activation_checkpointing_offload": "--fsdp_activation_checkpointing true",
}


@pytest.fixture
def worker(plan, monkeypatch):
    """Put on, in this process, the variables that a launch gives to its workers."""
    for name in list(os.environ):
        if name.startswith(("FSDP_", "PARALLELISM_CONFIG_")):
            monkeypatch.delenv(name)

    def become(line):
        told = worker_environment(plan(f"--cpu {line}"), {})
        for name, value in told.items():
            if name.startswith(("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_")):
                monkeypatch.setenv(name, value)

    return become


@pytest.mark.parametrize(("option", "word", "field", "value"), FSDP_FLAGS)
def test_fsdp_flags_reach_the_plugin(worker, option, word, field, value):
    worker(f"--use_fsdp {BESIDE.get(option, '')} --{option} {word}")
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert getattr(FullyShardedDataParallelPlugin(), field) == value


def test_offloading_in_version_2(worker):
    worker("--use_fsdp --fsdp_version 2 --fsdp_offload_params true")
    assert isinstance(FullyShardedDataParallelPlugin().cpu_offload, fsdp.CPUOffloadPolicy)


PARALLELISM_FLAGS = [
    *(
        (f"{axis}_size", "2", {"dp_shard": 2} if axis == "dp_replicate" else {}, f"{axis}_size", 2)
        for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    ),
    ("cp_backend", "torch", {}, "cp_backend", "torch"),
    ("cp_comm_strategy", "alltoall", {"cp": 2}, "cp_handler.cp_comm_strategy", "alltoall"),
    ("sp_backend", "deepspeed", {}, "sp_backend", "deepspeed"),
    ("sp_backend", "torch", {}, "sp_backend", "torch"),
    ("sp_seq_length", "128", {"sp": 2}, "sp_handler.sp_seq_length", 128),
    ("sp_seq_length_is_variable", "false", {"sp": 2}, "sp_handler.sp_seq_length_is_variable", False),
    ("sp_attn_implementation", "sdpa", {"sp": 2}, "sp_handler.sp_attn_implementation", "sdpa"),
]


@pytest.mark.parametrize(("option", "word", "others", "field", "value"), PARALLELISM_FLAGS)
def test_parallelism_flags_reach_the_configuration(worker, option, word, others, field, value):
    beside = " --parallelism_config_sp_seq_length_is_variable false" if option == "sp_seq_length" else ""
    beside += " --parallelism_config_sp_seq_length 64" if option == "sp_seq_length_is_variable" else ""
    given = " ".join(f"--parallelism_config_{axis}_size {size}" for axis, size in others.items())
    total = 2 ** len(re.findall("_size 2", f"{given} {option} {word}"))
    worker(f"--num_processes {total} --use_parallelism_config {given} --parallelism_config_{option} {word}{beside}")
    found = ParallelismConfig()
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value


def test_every_flag_is_checked():
    named = {option for option, *_ in FSDP_FLAGS}
    assert named == {option.name for option in of_feature("fsdp")} - {"use_fsdp"}
    named = {f"parallelism_config_{option}" for option, *_ in PARALLELISM_FLAGS}
    assert named == {option.name for option in of_feature("parallelism")}
