"""The call of DeepSpeed's launcher for several machines, and what reaches those machines."""

import os
import pathlib
import subprocess

import pytest

from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.resolve import resolve
from cases import cases

BASE = "--use_deepspeed --quiet --num_processes 4 --num_machines 2 --deepspeed_hostfile hosts"
BY = "--deepspeed_multinode_launcher"


@pytest.fixture(autouse=True)
def installed(programs, fake_package, written, monkeypatch):
    fake_package("deepspeed")
    for name in ("deepspeed", "pdsh", "ompi_info", "mpirun", "mpiname", "sinfo"):
        programs.add(name)
    written("hosts", "node1 slots=2\nnode2 slots=2\n")
    written("train.py.py", "")  # for --module
    monkeypatch.setenv("HOME", str(programs.folder.parent / "home"))
    for name in ("PYTHONPATH", "DS_ENV_FILE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def called(programs, parse):
    def call(line, *arguments):
        args = parse(f"{BASE} {line} train.py")
        args.training_script_args = list(arguments)
        runners.run(resolve(args))
        (entry,) = programs.calls()
        programs.record.unlink()
        assert entry["name"] == "deepspeed"
        return entry

    return call


@cases(
    "line, expected",
    ("", "--no_local_rank --launcher pdsh --num_gpus 2 --master_port 29500"),
    (f"{BY} slurm", "--no_local_rank --launcher slurm --num_gpus 2 --master_port 29500"),
    # These refuse a number.
    (f"{BY} mpich", "--no_local_rank --launcher mpich --master_port 29500"),
    (
        f"{BY} nossh --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 1234",
        "--node_rank 1 --no_ssh --no_local_rank --num_gpus 2 --master_addr 10.0.0.1 --master_port 1234",
    ),
    (
        "--deepspeed_inclusion_filter a:0,1@b:0,1",
        "--no_local_rank --launcher pdsh --include a:0,1@b:0,1 --master_port 29500",
    ),
    ("--module", "--no_local_rank --launcher pdsh --num_gpus 2 --master_port 29500 --module"),
)
def test_commands(called, line, expected):
    assert called(line)["arguments"] == ["--hostfile", "hosts", *expected.split(), "train.py"]


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_a_private_file_hands_variables_on_and_users_files_stay(called, programs, written, monkeypatch, launcher):
    home = programs.folder.parent / "home"
    home.mkdir(exist_ok=True)
    (home / ".deepspeed_env").write_text("MINE=from home\n\nWANDB_API_KEY=given\n")
    written(".deepspeed_env", "MINE=from here")
    variables = {"SEVERAL_LINES": "a\nb", "PLAIN": "1,h", "HOST_NAME": "%h", "ODD": "a $HOME"}
    for name, value in {"HF_TOKEN": "very secret", **variables}.items():
        monkeypatch.setenv(name, value)
    entry = called(f"--mixed_precision bf16 {BY} {launcher}")
    lines = entry["extra"].splitlines()
    assert {"ACCELERATE_MIXED_PRECISION=bf16", "PLAIN=1,h", "MASTER_ADDR=node1", "MASTER_PORT=29500"} <= {*lines}
    # DeepSpeed lets later lines win.
    assert lines[-3:] == ["MINE=from home", "WANDB_API_KEY=given", "MINE=from here"]
    assert not {"HF_TOKEN", "SEVERAL_LINES", "HOST_NAME", "ODD", "HOME"} & {line.partition("=")[0] for line in lines}
    path = pathlib.Path(entry["environment"]["DS_ENV_FILE"])
    assert entry["mode"] == 0o700 and not path.exists()
    assert pathlib.Path(".deepspeed_env").read_text() == "MINE=from here"


def test_what_was_held_back_is_said_and_the_file_is_gone_after_a_failure(programs, plan, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "very secret")
    monkeypatch.setenv("FAKE_STATUS", "5")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        runners.run(plan(BASE.replace("--quiet", "")))
    said = capsys.readouterr().err
    line = next(line for line in said.splitlines() if "not handed on to the other machines" in line)
    assert "HF_TOKEN" in line and "very secret" not in said
    assert caught.value.returncode == 5
    assert not os.path.exists(programs.calls()[0]["environment"]["DS_ENV_FILE"])


@cases(
    "line, fragment",
    (f"{BY} zzz", "choose one of pdsh, standard"),
    ("--deepspeed_inclusion_filter node1 --deepspeed_exclusion_filter node2", "exclude each other"),
    ("--num_processes 3", "multiple of --num_machines"),
    ("--deepspeed_hostfile none", "--deepspeed_hostfile: the host file cannot be read"),
    ("--deepspeed_hostfile=", "There is no host file"),
    (f"{BY} nossh", "needs --main_process_ip"),
    ("--machine_rank 1", "DeepSpeed's launcher pdsh starts the processes of all machines. Launch on one machine"),
    ("--max_restarts 2", "--max_restarts is an option of torch's"),
)
def test_refusals(called, programs, line, fragment):
    with pytest.raises(LaunchError, match=fragment):
        called(line)
    assert programs.calls() == []
