"""Commands and environments for programs that start processes themselves."""

import os
import sys

import pytest
from torch.distributed.run import get_args_parser

from accelerate.commands.launch import launch_command_parser
from accelerate.launch.errors import LaunchError
from accelerate.utils import launch


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def parse(line):
    return launch_command_parser().parse_args([*line.split(), "train.py", "--lr", "1"])


def test_simple_command():
    command, environment = launch.prepare_simple_launcher_cmd_env(parse("--cpu --mixed_precision bf16 --gpu_ids 1"))
    assert command == [sys.executable, "train.py", "--lr", "1"]
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["ACCELERATE_USE_CPU"] == "True"
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["PATH"] == os.environ["PATH"]
    assert "MASTER_ADDR" not in environment
    _, environment = launch.prepare_simple_launcher_cmd_env(parse("--num_processes 2 --main_process_port 5"))
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "5")
    assert launch.prepare_simple_launcher_cmd_env(parse("-m"))[0][1] == "-m"
    assert launch.prepare_simple_launcher_cmd_env(parse("--no_python"))[0][0] == "train.py"
    with pytest.raises(LaunchError, match="exclude each other"):
        launch.prepare_simple_launcher_cmd_env(parse("-m --no_python"))


def test_several_processes_in_terms_of_torchrun(monkeypatch):
    monkeypatch.setattr(launch, "is_port_in_use", lambda port: True)
    args = parse("--num_processes 2 --rdzv_conf a=1")
    environment = launch.prepare_multi_gpu_env(args)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"
    torchrun = launch._filter_args(args, get_args_parser(), ["train.py"])
    assert (torchrun.nproc_per_node, torchrun.standalone, torchrun.rdzv_conf) == ("2", True, "a=1")
    assert torchrun.training_script == "train.py"
    with pytest.raises(LaunchError, match="exclude each other"):
        launch.prepare_multi_gpu_env(parse("--module --no_python"))
    monkeypatch.setattr(launch, "is_port_in_use", lambda port: False)
    for words, port in (("", 29500), ("--main_process_port 1234", 1234), ("--main_process_port 0", None)):
        args = parse(f"--num_processes 2 {words}")
        launch.prepare_multi_gpu_env(args)
        assert args.main_process_port == port or (port is None and args.main_process_port > 0)
        assert args.master_port == str(args.main_process_port) and not hasattr(args, "standalone")


def test_several_machines():
    line = "--num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip 1.2.3.4 --main_process_port 1234"
    args = parse(f"{line} --same_network")
    launch.prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, args.nnodes, args.node_rank) == ("2", "2", 1)
    assert (args.master_addr, args.master_port) == ("1.2.3.4", "1234")
    for words in ("", "--same_network --rdzv_backend c10d"):
        args = parse(f"{line} {words}")
        launch.prepare_multi_gpu_env(args)
        assert args.rdzv_endpoint == "1.2.3.4:1234"
    with pytest.raises(LaunchError, match="--main_process_ip"):
        launch.prepare_multi_gpu_env(parse("--num_processes 4 --num_machines 2"))
    with pytest.raises(LaunchError, match="--num_processes is 3"):
        launch.prepare_multi_gpu_env(parse("--num_processes 3 --num_machines 2"))


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "nossh"])
def test_deepspeed_on_several_machines(launcher):
    line = f"--use_deepspeed --num_processes 8 --num_machines 2 --main_process_ip 10.0.0.1 --main_process_port 1234 --machine_rank 0 --deepspeed_hostfile hosts --deepspeed_multinode_launcher {launcher}"
    command, environment = launch.prepare_deepspeed_cmd_env(parse(line))
    how = ["--no_local_rank", "--launcher", launcher]
    if launcher == "nossh":
        how = ["--node_rank", "0", "--no_ssh", "--no_local_rank"]
    if launcher != "openmpi":
        how += ["--num_gpus", "4"]
    meeting = ["--master_addr", "10.0.0.1", "--master_port", "1234"]
    assert command == ["deepspeed", "--hostfile", "hosts", *how, *meeting, "train.py", "--lr", "1"]
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"


def test_deepspeed_standard_is_torchrun():
    several = "--num_processes 8 --num_machines 2 --main_process_ip 10.0.0.1 --main_process_port 1234"
    line = f"--use_deepspeed {several} --deepspeed_multinode_launcher"
    args = parse(f"{line} standard")
    assert launch.prepare_deepspeed_cmd_env(args)[0] is None
    assert (args.nproc_per_node, args.nnodes) == ("4", "2")
    with pytest.raises(LaunchError, match="choose one of pdsh"):
        launch.prepare_deepspeed_cmd_env(parse(f"{line} pdhs"))


def test_sagemaker(monkeypatch):
    from accelerate.commands.config.config_args import SageMakerConfig

    account = {"iam_role_name": "trainer", "profile": "mine", "region": "eu-west-1"}
    kind = ("AMAZON_SAGEMAKER", "DATA_PARALLEL", "no", False, False)
    config = SageMakerConfig(*kind, ec2_instance_type="ml.p3.16xlarge", num_machines=2, **account)
    arguments, inputs = launch.prepare_sagemager_args_inputs(config, parse("--mixed_precision bf16"))
    assert inputs is None and arguments["hyperparameters"] == {"lr": 1} and arguments["instance_count"] == 2
    assert arguments["distribution"] == {"smdistributed": {"dataparallel": {"enabled": True}}}
    variables = (
        "USE_SAGEMAKER=true MIXED_PRECISION=bf16 DYNAMO_BACKEND=NO DYNAMO_MODE=default DYNAMO_USE_FULLGRAPH=False "
        "DYNAMO_USE_DYNAMIC=False DYNAMO_USE_REGIONAL_COMPILATION=False SAGEMAKER_DISTRIBUTED_TYPE=DATA_PARALLEL"
    )
    assert arguments["environment"] == dict(f"ACCELERATE_{pair}".split("=") for pair in variables.split())
    assert (os.environ["AWS_PROFILE"], os.environ["AWS_DEFAULT_REGION"]) == ("mine", "eu-west-1")
    config.profile = None
    with pytest.raises(OSError, match="Which AWS account"):
        launch.prepare_sagemager_args_inputs(config, parse(""))
    launch.prepare_sagemager_args_inputs(config, parse("--aws_access_key_id a --aws_secret_access_key b"))
    assert (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]) == ("a", "b")


@pytest.mark.parametrize(
    ("kind", "ranks"), [("NO", (None, None)), ("MULTI_GPU", ("1", "3")), ("multi_cpu", ("1", "3"))]
)
def test_prepare_for_launch(monkeypatch, kind, ranks):
    for name, value in {"NODE_RANK": "1", "NPROC": "2", "RANK": None, "LOCAL_RANK": None}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    seen = []
    launch.PrepareForLaunch(lambda *args: seen.append((args, *map(os.environ.get, ("LOCAL_RANK", "RANK")))), kind)(
        1, "a"
    )
    assert seen == [(("a",), *ranks)]
    assert os.environ.pop("FORK_LAUNCHED") == "1"


def test_prepare_for_launch_meets_through_a_file(monkeypatch, tmp_path):
    import torch.distributed as dist

    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("ACCELERATE_DEBUG_RDV_FILE", str(tmp_path / "meeting"))
    sizes = []
    launch.PrepareForLaunch(lambda: sizes.append(dist.get_world_size()), debug=True)(0)
    dist.destroy_process_group()
    assert sizes == [1]
