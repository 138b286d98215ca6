"""From flags, environment, file and hardware to a plan."""

import argparse
import contextlib
import re
import socket
import sys

import pytest

from accelerate.extensions.dry_run.text import show
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import worker_environment
from accelerate.launch.resolve import resolve
from accelerate.runtime import ranks
from cases import cases

TWO = "--num_machines 2 --machine_rank 0 --main_process_ip a"


def test_arguments_without_a_record_count_when_they_differ(parse):
    args = parse("--cpu train.py")
    args.num_processes = 3  # assigned by a program
    assert resolve(args).num_processes == 3
    bare = argparse.Namespace(training_script="train.py", training_script_args=[], mixed_precision="bf16")
    assert resolve(bare)["mixed_precision"] == "bf16"


@cases(
    "count, line, message",
    (1, "--num_processes 2", "--num_processes is 2 .*there are 1 cuda devices.*--cpu"),
    (1, "--gpu_ids ,", "--gpu_ids is ','"),
    (0, "--num_processes 0", "--num_processes is 0 "),
    (0, "--multi_gpu --num_processes 2", "--multi_gpu .*needs GPUs"),
    (2, "--multi_gpu --num_processes 1", "at least two processes"),
    (2, "--cpu --multi_gpu", "--cpu and --multi_gpu exclude each other"),
    (0, "--use_fsdp --use_deepspeed", "--use_deepspeed and --use_fsdp exclude each other"),
    (0, "--use_megatron_lm --use_fsdp", "--use_megatron_lm and --use_fsdp exclude each other"),
    (0, "--num_processes 2 --rdzv_conf x", "--rdzv_conf holds 'x'"),
    (0, "--num_processes 2 --main_process_port 70000", "65535"),
    (0, "--num_processes 2 --rdzv_backend etcd", "choose one of static, c10d"),
    (0, "--cpu --num_machines 2 --main_process_ip a", "--machine_rank, from 0 to 1"),
    (0, "--cpu --num_machines 2 --machine_rank 0", "Give --main_process_ip"),
    (0, "--cpu --num_machines 2 --machine_rank 2 --main_process_ip a", "numbered from 0 to 1"),
    (0, "--cpu --num_machines 0", "at least 1"),
    (0, f"--cpu {TWO} --main_process_port 0", "numbers from 1 to 65535, the same on each"),
    (0, f"--cpu {TWO} --num_processes 3", "shared evenly by 2"),
    (0, f"--cpu {TWO} --rdzv_conf join_timeout=soon", "seconds above 0"),
    (4, f"{TWO} --num_processes 10", "5 for each of 2 machines, and there are 4 cuda devices.*at most 8"),
)
def test_what_does_not_fit(plan, gpus, count, line, message):
    if count:
        gpus(count)
    with pytest.raises(LaunchError, match=message):
        plan(line)


def test_threads_that_the_user_has_set_stay(plan, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert not any("OMP_NUM_THREADS" in note for note in plan("--cpu --num_processes 2").notes)


def test_tasks_of_a_scheduler_and_another_launcher_are_said(plan):
    """Each of the tasks would start mpirun: nothing of what the scheduler says reaches the run, and a line reports it."""
    tasks = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": "7"}
    tasks |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}
    found = plan("--cpu --mpirun_hostfile hosts --num_processes 2", tasks)
    assert found.runner == "mpi" and "RANK" not in found.extra
    assert any("Slurm has started 2 of these launches" in note for note in found.notes)
    assert not any("of these launches" in note for note in plan("--cpu --mpirun_hostfile hosts").notes)


def test_settings_without_effect_are_said(plan, default_file):
    assert plan("--zero_stage 2").notes == ("--zero_stage has no effect without --use_deepspeed.",)
    assert plan("--machine_rank 1").notes == ("--machine_rank has no effect without --num_machines N.",)
    assert plan("--machine_rank 0 --num_machines 1").notes == ()
    (note,) = plan("--cpu --use_deepspeed --deepspeed_config_file ds.json --zero_stage 2").notes
    assert note == "--zero_stage counts only where ds.json says 'auto': a file's own values hold."
    assert "zero_stage" not in show(plan("--cpu --use_deepspeed --deepspeed_config_file ds.json"))
    assert re.search("zero_stage +2 +default\n", show(plan("--cpu --use_deepspeed")))
    default_file("distributed_type: NO\ndeepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 4}")
    result = plan("")
    assert "deepspeed_config in" in result.notes[0]
    assert result["gradient_accumulation_steps"] is None
    assert plan("--gradient_accumulation_steps 2")["gradient_accumulation_steps"] == 2


@cases(
    "line, end",
    ("-m json.tool a", [sys.executable, "-m", "json.tool", "a"]),
    ("--no_python true x", ["true", "x"]),
    ("none.py", "There is no script 'none.py'"),
    ("--no_python no_such_program", "'no_such_program' is no program"),
    ("-m --no_python true", "--module and --no_python"),
)
def test_script(found_or_refused, parse, line, end):
    found_or_refused(end, lambda: resolve(parse(line)).command)


def test_ports_and_settings_of_the_rendezvous(plan):
    line = "--cpu --num_processes 2"
    assert plan(f"{line} --main_process_port 0").rendezvous.port == 0
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--main_process_port is {port} .*already in use"):
            plan(f"{line} --main_process_port {port}")
    assert plan(f"{line} --main_process_port {port}").rendezvous.port == port
    rendezvous = plan(f"{line} --rdzv_backend c10d --rdzv_conf timeout=5,x=y").rendezvous
    assert (rendezvous.backend, rendezvous.settings) == ("c10d", {"timeout": "5", "x": "y"})


@cases(
    "processes, given, message",
    (4, "dp_replicate=2 dp_shard=2", None),
    (1, "", None),
    (4, "sp=2", None),  # DeepSpeed takes the other factor for data parallelism
    (3, "dp_shard=2 tp=2", "dp_shard_size=2 x tp_size=2 = 4 processes, and --num_processes is 3"),
    (2, "tp=4", "are for tp_size=4 processes.*Launch 4 processes"),
    (1, "cp=2", "are for cp_size=2 processes, and --num_processes is 1"),
    (2, "dp_shard=0", "--parallelism_config_dp_shard_size is 0 .*at least 1"),
)
def test_sizes_of_parallelism(plan, processes, given, message):
    sizes = [word.split("=") for word in given.split()]
    flags = " ".join(f"--parallelism_config_{axis}_size {size}" for axis, size in sizes)
    plan(f"--cpu --num_processes {processes} {flags}")  # they have no effect then, which a note says
    with pytest.raises(LaunchError, match=message) if message else contextlib.nullcontext():
        plan(f"--cpu --num_processes {processes} --use_parallelism_config {flags}")


AGENT = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0"}
AGENT |= {"MASTER_PORT": "29500", "GROUP_RANK": "0", "ROLE_RANK": "1", "TORCHELASTIC_ERROR_FILE": "/e"}


@cases(
    "variables",
    {"TORCHELASTIC_RUN_ID": "none"},
    {"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"},
    {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_launch_by_a_rank_is_a_separate_run(plan, variables, count):
    environ = {"HF_HOME": "/nowhere", "PATH": "/bin", **AGENT, **variables}
    found = plan(f"--cpu --num_processes {count}", environ)
    environment = worker_environment(found, environ)
    ours = {"RANK": "0", "WORLD_SIZE": "1"} if count == 1 else {}
    assert {name: environment[name] for name in {*AGENT} & environment.keys()} == ours
    assert not any(name.startswith("TORCHELASTIC_") for name in environment)
    assert environment["PATH"] == "/bin"
    assert not any("joins" in note for note in found.notes)
    assert ranks.resolve(environment) == ranks.Ranks(0, 1, 0, None, "torchrun") if count == 1 else True


@cases("off, on", ("DEEPSPEED", "FSDP"), ("FSDP", "DEEPSPEED"))
def test_a_variable_that_an_option_overrides_does_not_reach_the_ranks(plan, off, on):
    environ = {"HF_HOME": "/nowhere", f"ACCELERATE_USE_{off}": "true"}
    environment = worker_environment(plan(f"--cpu --num_processes 2 --use_{on.lower()}", environ), environ)
    assert environment.keys() & {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"} == {f"ACCELERATE_USE_{on}"}


def test_a_process_of_a_controller_joins_and_a_line_says_what(plan):
    environ = {"HF_HOME": "/nowhere", "RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0"}
    found = plan("--cpu --num_processes 1", environ)
    assert environ.items() <= worker_environment(found, environ).items()
    assert [note for note in found.notes if "joins" in note] == [
        "RANK=1 and WORLD_SIZE=4 are set: this process joins a run of 4 processes as rank 1 at job-0, port 29500. "
        "Unset them for a separate run."
    ]
    assert not any("joins" in note for note in plan("--cpu", {"RANK": "0", "WORLD_SIZE": "1"}).notes)
