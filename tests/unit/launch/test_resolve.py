"""From flags, environment, file and hardware to a plan."""

import argparse
import dataclasses
import socket
import sys

import pytest

from accelerate.launch.env import worker_environment
from accelerate.launch.errors import LaunchError, NotAvailableError
from accelerate.launch.plan import Source
from accelerate.launch.resolve import fill, resolve


@pytest.fixture
def file(place):
    def write(text):
        (place / "home" / "accelerate").mkdir(parents=True, exist_ok=True)
        (place / "home" / "accelerate" / "default_config.yaml").write_text(text)

    return write


def test_nothing_given_is_one_process(plan):
    result = plan("")
    assert (result.num_processes, result.on_cpu, result.elastic) == (1, True, False)
    assert result["cpu"] is False  # nobody asked to stay away from GPUs
    assert result.command == [sys.executable, "train.py"]
    assert result.notes == ()
    assert result["num_cpu_threads_per_process"] is None


def test_command_line_over_environment_over_file_over_default(plan, file, monkeypatch):
    assert plan("").settings["mixed_precision"].source is Source.DEFAULT
    file("distributed_type: NO\nmixed_precision: fp16")
    assert (plan("")["mixed_precision"], plan("").settings["mixed_precision"].source) == ("fp16", Source.FILE)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    resolved = plan("").settings["mixed_precision"]
    assert (resolved.value, resolved.origin) == ("bf16", "environment variable ACCELERATE_MIXED_PRECISION")
    resolved = plan("--mixed_precision no").settings["mixed_precision"]
    assert (resolved.value, resolved.origin) == ("no", "command line")


def test_a_default_given_by_hand_still_wins(plan, file):
    file("distributed_type: NO\ndynamo_config: {dynamo_mode: max-autotune}")
    assert plan("")["dynamo_mode"] == "max-autotune"
    assert plan("--dynamo_mode default")["dynamo_mode"] == "default"


def test_arguments_without_a_record_count_when_they_differ(parse):
    args = parse("--cpu train.py")
    args.num_processes = 3  # assigned by a program
    assert resolve(args).num_processes == 3
    bare = argparse.Namespace(training_script="train.py", training_script_args=[], mixed_precision="bf16")
    assert resolve(bare)["mixed_precision"] == "bf16"


@pytest.mark.parametrize("line", ["--cpu --num_processes 2", "--num_processes 2"])
def test_two_processes_on_the_cpu(plan, line):
    result = plan(line)
    assert (result.num_processes, result.on_cpu, result.elastic, result["cpu"]) == (2, True, True, True)
    assert result.command == [sys.executable, "-u", "train.py"]
    assert result["num_cpu_threads_per_process"] == 4
    assert any("OMP_NUM_THREADS=4" in note for note in result.notes)
    assert any("no GPU" in note for note in result.notes) is ("--cpu" not in line)
    assert result.rendezvous.port == 0


def test_threads_of_the_user_are_kept(plan, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert plan("--cpu --num_processes 2").notes == ()
    assert plan("--cpu --num_processes 2 --num_cpu_threads_per_process 2")["num_cpu_threads_per_process"] == 2


def test_one_process_per_gpu(plan, gpus):
    gpus(4)
    assert (plan("").num_processes, plan("").on_cpu) == (4, False)
    assert plan("--gpu_ids 1,3").num_processes == 2
    assert plan("--num_processes 1").elastic is False
    assert (plan("--cpu").num_processes, plan("--cpu").on_cpu) == (1, True)


def test_more_processes_than_gpus(plan, gpus):
    gpus(1)
    with pytest.raises(LaunchError, match="--num_processes is 2 .*there are 1 cuda devices.*--cpu"):
        plan("--num_processes 2")
    assert plan("--num_processes 2 --cpu").num_processes == 2
    with pytest.raises(LaunchError, match="--gpu_ids is ','"):
        plan("--gpu_ids ,")


def test_multi_gpu(plan, gpus, file):
    with pytest.raises(LaunchError, match="--multi_gpu .*needs GPUs"):
        plan("--multi_gpu --num_processes 2")
    gpus(2)
    assert plan("--multi_gpu").num_processes == 2
    with pytest.raises(LaunchError, match="at least two processes"):
        plan("--multi_gpu --num_processes 1")
    with pytest.raises(LaunchError, match="--cpu and --multi_gpu exclude each other"):
        plan("--cpu --multi_gpu")
    file("distributed_type: MULTI_GPU\nnum_processes: 2")
    assert plan("--num_processes 1").num_processes == 1
    assert plan("--cpu")["multi_gpu"] is False


@pytest.mark.parametrize("count", [0, -1])
def test_impossible_number_of_processes(plan, count):
    with pytest.raises(LaunchError, match=f"--num_processes is {count} "):
        plan(f"--num_processes {count}")


def test_what_cannot_run_yet_is_an_error(plan):
    with pytest.raises(NotAvailableError, match="Megatron-LM.*not available in this version yet.*What works"):
        plan("--use_megatron_lm")


def test_what_cannot_run_yet_is_an_error_wherever_it_comes_from(plan, file):
    file("distributed_type: MEGATRON_LM")
    with pytest.raises(NotAvailableError, match=r"Megatron-LM .*default_config\.yaml"):
        plan("")
    elsewhere = {"HF_HOME": "/nowhere"}
    assert plan("--cpu --num_processes 2", elsewhere).num_processes == 2
    with pytest.raises(NotAvailableError, match="ACCELERATE_USE_MEGATRON_LM"):
        plan("", {**elsewhere, "ACCELERATE_USE_MEGATRON_LM": "true"})


@pytest.mark.parametrize(
    ("line", "variable"),
    [
        ("--use_fsdp", "ACCELERATE_USE_FSDP"),
        ("--use_parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG"),
        ("--mixed_precision fp8", "ACCELERATE_MIXED_PRECISION"),
    ],
)
def test_sharding_and_fp8_start(plan, line, variable):
    result = plan(f"--cpu --num_processes 2 {line}")
    assert (result.runner, result.num_processes) == ("local", 2)
    assert worker_environment(result, {})[variable] in ("true", "fp8")


@pytest.mark.parametrize(
    ("line", "runner"),
    [
        ("--cpu", "single"),
        ("--cpu --num_processes 2", "local"),
        ("--cpu --max_restarts 1", "local"),
        ("--cpu --num_machines 2 --machine_rank 0 --main_process_ip a", "machines"),
        ("--cpu --mpirun_hostfile hosts", "mpi"),
        ("--cpu --use_deepspeed --num_processes 2", "local"),
        ("--cpu --use_deepspeed --num_machines 2", "deepspeed"),
        ("--cpu --use_deepspeed --num_machines 2 --deepspeed_multinode_launcher pdsh", "deepspeed"),
        (
            "--cpu --use_deepspeed --num_machines 2 --deepspeed_multinode_launcher standard --machine_rank 1 --main_process_ip a",
            "machines",
        ),
        ("--tpu", "tpu"),
        ("--tpu --tpu_cluster", "tpu_pod"),
    ],
)
def test_who_starts_the_processes(plan, line, runner):
    assert plan(line).runner == runner


def test_sagemaker_starts_a_job(plan, file):
    file(
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\nec2_instance_type: ml.m5.large\niam_role_name: role"
    )
    assert plan("").runner == "sagemaker"


def test_two_paradigms(plan):
    with pytest.raises(LaunchError, match="--use_deepspeed and --use_fsdp exclude each other"):
        plan("--use_fsdp --use_deepspeed")


def test_settings_without_effect_are_said(plan, file):
    assert plan("--zero_stage 2").notes == ("--zero_stage has no effect without --use_deepspeed.",)
    assert plan("--machine_rank 1").notes == ("--machine_rank has no effect without --num_machines N.",)
    assert plan("--machine_rank 0 --num_machines 1").notes == ()
    file("distributed_type: NO\ndeepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 4}")
    result = plan("")
    assert "deepspeed_config in" in result.notes[0]
    assert result["gradient_accumulation_steps"] is None
    assert plan("--gradient_accumulation_steps 2")["gradient_accumulation_steps"] == 2


def test_variables_are_checked(plan):
    with pytest.raises(LaunchError, match="ACCELERATE_MIXED_PRECISION is 'x'"):
        plan("", {"ACCELERATE_MIXED_PRECISION": "x"})


def test_script(plan, parse, place, monkeypatch):
    with pytest.raises(LaunchError, match=r"There is no script 'none\.py'"):
        resolve(parse("none.py"))
    with pytest.raises(LaunchError, match="options of the launcher come before"):
        resolve(argparse.Namespace(**{**vars(parse("x")), "training_script": "--cpu"}))
    assert resolve(parse("-m json.tool a")).command == [sys.executable, "-m", "json.tool", "a"]
    assert resolve(parse("-m train")).command[-1] == "train"
    with pytest.raises(LaunchError, match=r"There is no module 'no\.such'"):
        resolve(parse("-m no.such"))
    assert resolve(parse("--no_python true x")).command == ["true", "x"]
    with pytest.raises(LaunchError, match="'no_such_program' is no program"):
        resolve(parse("--no_python no_such_program"))
    with pytest.raises(LaunchError, match="--module and --no_python"):
        resolve(parse("-m --no_python true"))


def test_ports(plan):
    assert plan("--cpu --num_processes 2 --main_process_port 0").rendezvous.port == 0
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--main_process_port is {port} .*already listens"):
            plan(f"--cpu --num_processes 2 --main_process_port {port}")
    assert plan(f"--cpu --num_processes 2 --main_process_port {port}").rendezvous.endpoint == f"127.0.0.1:{port}"
    with pytest.raises(LaunchError, match="65535"):
        plan("--cpu --num_processes 2 --main_process_port 70000")


def test_rendezvous_settings(plan):
    rendezvous = plan("--cpu --num_processes 2 --rdzv_backend c10d --rdzv_conf timeout=5,x=y").rendezvous
    assert (rendezvous.backend, rendezvous.settings) == ("c10d", {"timeout": "5", "x": "y"})
    with pytest.raises(LaunchError, match="--rdzv_conf holds 'x'"):
        plan("--cpu --num_processes 2 --rdzv_conf x")


@pytest.mark.parametrize("line", ["--max_restarts 1", "--tee 3", "--log_dir logs"])
def test_one_process_is_supervised_where_that_is_asked_for(plan, line):
    assert plan(line).elastic
    assert plan(line).num_processes == 1


def test_inside_another_launch(plan, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert plan("").notes[0].startswith("RANK=1 and WORLD_SIZE=2 are set")


def test_plan_is_frozen(plan):
    result = plan("")
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.num_processes = 2
    with pytest.raises(TypeError):
        result.settings["cpu"] = None


def test_fill_writes_the_outcome(parse):
    args = parse("--num_processes 2 train.py")
    assert fill(args, resolve(args)) is args
    assert (args.cpu, args.use_cpu, args.mixed_precision, args.dynamo_backend) == (True, True, "no", "no")
