"""What `--simulate` makes of the settings of a run, and what it refuses before anything starts."""

import sys

import pytest

from accelerate.extensions.dry_run.text import show
from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from cases import cases


def test_one_process_gets_the_variables_of_its_rank_and_the_settings_of_the_run(plan, default_file):
    default_file("distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\nfsdp_config: {fsdp_version: 2}")
    found = plan(
        "--simulate 128x8 --simulate_rank 513 --simulate_steps 3 --simulate_shapes_only --simulate_report r.json"
    )
    assert (found.num_processes, found.on_cpu, found.runner) == (1024, True, "simulate")
    (first, second) = found.notes
    assert "num_machines is 128 (--simulate 128x8), not 2 " in first and "num_processes is 1024" in second
    started = runners.process(found)
    assert (
        started.command[:3] == (sys.executable, "-m", "accelerate.extensions.simulate")
        and started.command[-1] == "train.py"
    )
    ranks = {"RANK": "513", "WORLD_SIZE": "1024", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    more = {"STEPS": "3", "SHAPES_ONLY": "true", "REPORT": "r.json"}
    assert ranks.items() <= started.environment.items() and started.environment["FSDP_VERSION"] == "2"
    assert {
        f"ACCELERATE_SIMULATE_{name}": value for name, value in more.items()
    }.items() <= started.environment.items()
    assert "1 of 1024 processes on the CPU would be started in place" in show(found)


def test_a_scheduler_and_devices_have_no_say(plan, gpus):
    gpus(2)
    found = plan("--multi_gpu --simulate 2x4", {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "1"})
    assert found.on_cpu and found.extra["WORLD_SIZE"] == "8" and found.notes == ()


@cases(
    "line, message",
    ("--simulate 128", "--simulate is '128'; write machines x processes of each, such as 128x8"),
    ("--simulate 0x8", "--simulate is '0x8'"),
    ("--simulate 2x4 --simulate_rank 8", "--simulate_rank is 8; 2x4 has the ranks 0 to 7"),
    ("--simulate 2x4 --simulate_rank -1", "--simulate_rank is -1"),
    ("--simulate 2x4 --simulate_steps 0", "--simulate_steps is 0"),
    ("--simulate 2x4 --num_processes 4", "--num_processes is 4, and --simulate 2x4 means 8"),
    ("--simulate 2x4 --num_machines 4", "--num_machines is 4"),
    ("--simulate 2x4 --machine_rank 1", "--machine_rank has no meaning with --simulate"),
    ("--simulate 2x4 --main_process_ip a", "--main_process_ip has no meaning"),
    ("--simulate 2x4 --use_deepspeed", "does not run DeepSpeed"),
    ("--simulate 2x4 --use_megatron_lm", "does not run Megatron-LM"),
    ("--simulate 2x4 --tpu", "does not run Training on TPUs"),
    ("--simulate 2x4 --use_parallelism_config --parallelism_config_tp_size 4", "multiply to the number of processes"),
)
def test_what_contradicts_it_is_an_error(plan, line, message):
    with pytest.raises(LaunchError, match=message):
        plan(line)
