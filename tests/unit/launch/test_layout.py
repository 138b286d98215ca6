"""Sharding and parallel dimensions at the launch: the arithmetic, and every flag on its way to the field that it sets."""

import os
import re

import pytest
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap

from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.options import of_feature
from accelerate.launch.env import worker_environment
from accelerate.launch.errors import LaunchError
from accelerate.parallelism_config import ParallelismConfig

AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")


def sizes(**given):
    return " ".join(f"--parallelism_config_{axis}_size {size}" for axis, size in given.items())


@pytest.mark.parametrize(
    ("processes", "given"),
    [
        (4, {"dp_replicate": 2, "dp_shard": 2}),
        (4, {"dp_shard": 2, "tp": 2}),
        (2, {"cp": 2}),
        (2, {}),  # all of them are copies
        (1, {}),
        (4, {"sp": 2}),  # DeepSpeed takes the other factor for data parallelism
    ],
)
def test_sizes_that_fit(plan, processes, given):
    plan(f"--cpu --num_processes {processes} --use_parallelism_config {sizes(**given)}")


@pytest.mark.parametrize(
    ("processes", "given", "message"),
    [
        (3, {"dp_shard": 2, "tp": 2}, "dp_shard_size=2 x tp_size=2 = 4 processes, and --num_processes is 3"),
        (2, {"tp": 4}, "are for tp_size=4 processes.*Launch 4 processes"),
        (1, {"cp": 2}, "are for cp_size=2 processes, and --num_processes is 1"),
        (3, {"sp": 2}, "sp_size=2 processes, and --num_processes is 3"),
        (2, {"dp_shard": 0}, "--parallelism_config_dp_shard_size is 0 .*at least 1"),
    ],
)
def test_sizes_that_do_not(plan, processes, given, message):
    line = f"--cpu --num_processes {processes} --use_parallelism_config {sizes(**given)}"
    with pytest.raises(LaunchError, match=message):
        plan(line)
    plan(line.replace("--use_parallelism_config ", ""))  # they have no effect then, which a note says


def test_torch_takes_all_processes_for_sequence_parallelism(plan):
    line = "--cpu --num_processes 4 --use_parallelism_config --parallelism_config_sp_backend torch " + sizes(sp=2)
    with pytest.raises(LaunchError, match="sp_size=2 processes, and --num_processes is 4"):
        plan(line)
    assert plan(f"{line} {sizes(dp_shard=2)}").num_processes == 4


def test_sharding_needs_a_dimension(plan):
    line = "--cpu --num_processes 2 --use_fsdp --fsdp_version 2"
    assert plan(line).num_processes == 2  # without a configuration of dimensions all of them are shards
    with pytest.raises(LaunchError, match="Add --parallelism_config_dp_shard_size 2"):
        plan(f"{line} --use_parallelism_config")


def test_sizes_of_a_file_are_checked_too(plan, place):
    (place / "c.yaml").write_text(
        "distributed_type: NO\nnum_processes: 2\nuse_cpu: true\nparallelism_config: {parallelism_config_tp_size: 3}"
    )
    with pytest.raises(LaunchError, match="tp_size=3 processes, and --num_processes is 2 .*configuration file"):
        plan("--config_file c.yaml")


@pytest.mark.parametrize(
    ("line", "notes"),
    [
        ("--fsdp_version 2 --fsdp_sharding_strategy SHARD_GRAD_OP", ["--fsdp_sharding_strategy"]),
        ("--fsdp_version 2 --fsdp_use_orig_params false --fsdp_forward_prefetch true", ["_prefetch", "_orig_params"]),
        ("--fsdp_version 2 --fsdp_backward_prefetch BACKWARD_POST", ["--fsdp_backward_prefetch"]),
        ("--fsdp_version 1 --fsdp_reshard_after_forward false", ["--fsdp_reshard_after_forward"]),
        ("--fsdp_version 2 --fsdp_reshard_after_forward false", []),
        ("--fsdp_version 1 --fsdp_sharding_strategy NO_SHARD", []),
        ("--fsdp_version 2 --fsdp_sharding_strategy FULL_SHARD", []),  # what version 2 does
    ],
)
def test_settings_of_the_other_version_are_said(plan, line, notes):
    told = [note for note in plan(f"--use_fsdp {line}").notes if "has no effect with --fsdp_version" in note]
    assert len(told) == len(notes)
    assert all(fragment in note for fragment, note in zip(notes, told, strict=True))


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
@pytest.mark.parametrize("hyphens", [False, True])
def test_fsdp_flags_reach_the_plugin(worker, option, word, field, value, hyphens):
    flag = option.replace("_", "-") if hyphens else option
    worker(f"--use_fsdp {BESIDE.get(option, '')} --{flag} {word}")
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert getattr(FullyShardedDataParallelPlugin(), field) == value


def test_every_fsdp_flag_is_checked():
    assert {option for option, *_ in FSDP_FLAGS} == {
        option.name for option in of_feature("fsdp") if option.name != "use_fsdp"
    }


def test_offloading_in_version_2(worker):
    worker("--use_fsdp --fsdp_version 2 --fsdp_offload_params true")
    assert isinstance(FullyShardedDataParallelPlugin().cpu_offload, fsdp.CPUOffloadPolicy)


PARALLELISM_FLAGS = [
    *((f"{axis}_size", "2", {"dp_shard": 2} if axis == "dp_replicate" else {}, f"{axis}_size", 2) for axis in AXES),
    ("cp_backend", "torch", {}, "cp_backend", "torch"),
    ("cp_comm_strategy", "alltoall", {"cp": 2}, "cp_handler.cp_comm_strategy", "alltoall"),
    ("sp_backend", "deepspeed", {}, "sp_backend", "deepspeed"),
    ("sp_backend", "torch", {}, "sp_backend", "torch"),
    ("sp_seq_length", "128", {"sp": 2}, "sp_handler.sp_seq_length", 128),
    ("sp_seq_length_is_variable", "false", {"sp": 2}, "sp_handler.sp_seq_length_is_variable", False),
    (
        "sp_attn_implementation",
        "flash_attention_2",
        {"sp": 2},
        "sp_handler.sp_attn_implementation",
        "flash_attention_2",
    ),
]


@pytest.mark.parametrize(("option", "word", "others", "field", "value"), PARALLELISM_FLAGS)
def test_parallelism_flags_reach_the_configuration(worker, option, word, others, field, value):
    beside = " --parallelism_config_sp_seq_length_is_variable false" if option == "sp_seq_length" else ""
    beside += " --parallelism_config_sp_seq_length 64" if option == "sp_seq_length_is_variable" else ""
    given = sizes(**others)
    total = 2 ** len(re.findall("_size 2", f"{given} {option} {word}"))
    worker(f"--num_processes {total} --use_parallelism_config {given} --parallelism_config_{option} {word}{beside}")
    found = ParallelismConfig()
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value


def test_every_parallelism_flag_is_checked():
    named = {f"parallelism_config_{option}" for option, *_ in PARALLELISM_FLAGS}
    assert named == {option.name for option in of_feature("parallelism")}
