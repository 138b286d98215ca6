"""What workers get: the variables of a plan, and every flag of sharding and parallelism on its way to the field that it sets."""

import operator
import os

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
