"""Commands and environments for programs that start processes themselves."""

import pytest
from torch.distributed.run import get_args_parser

from accelerate.commands.launch import launch_command_parser
from accelerate.launch.errors import LaunchError
from accelerate.utils import launch

pytestmark = pytest.mark.usefixtures("place")


def parse(line):
    return launch_command_parser().parse_args([*line.split(), "train.py", "--lr", "1"])


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


def test_deepspeed_standard_is_torchrun():
    several = "--num_processes 8 --num_machines 2 --main_process_ip 10.0.0.1 --main_process_port 1234"
    line = f"--use_deepspeed {several} --deepspeed_multinode_launcher"
    args = parse(f"{line} standard")
    assert launch.prepare_deepspeed_cmd_env(args)[0] is None
    assert (args.nproc_per_node, args.nnodes) == ("4", "2")
    with pytest.raises(LaunchError, match="choose one of pdsh"):
        launch.prepare_deepspeed_cmd_env(parse(f"{line} pdhs"))


def test_prepare_for_launch_meets_through_a_file(monkeypatch, tmp_path):
    import torch.distributed as dist

    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("ACCELERATE_DEBUG_RDV_FILE", str(tmp_path / "meeting"))
    sizes = []
    launch.PrepareForLaunch(lambda: sizes.append(dist.get_world_size()), debug=True)(0)
    dist.destroy_process_group()
    assert sizes == [1]


def test_mpirun_is_asked_for_its_options(programs):
    programs.add("mpirun", "mpirun (Open MPI) 4.1.4")
    assert launch._get_mpirun_args() == ("mpirun", "--hostfile", "-n", "--npernode", "--bind-to")
    programs.add("mpirun", "HYDRA build details:")
    assert launch._get_mpirun_args() == ("mpirun", "-f", "-n", "-ppn", "")
