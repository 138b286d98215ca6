"""The call of DeepSpeed's launcher for several machines, and what reaches those machines."""

import os
import pathlib
import subprocess
import sys

import pytest

from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import Resolved, Source
from accelerate.launch.runners import deepspeed

HOSTS = "node1 slots=2\nnode2 slots=2\n"
BASE = "--use_deepspeed --quiet --num_processes 4 --num_machines 2 --deepspeed_hostfile hosts"


@pytest.fixture(autouse=True)
def installed(programs, fake_package, written, monkeypatch):
    fake_package("deepspeed", launcher__of__runner="DS_ENV_FILE = 1")
    for name in ("deepspeed", "pdsh", "ompi_info", "mpirun", "mpiname", "sinfo"):
        programs.add(name)
    written("hosts", HOSTS)
    monkeypatch.setenv("HOME", str(programs.folder.parent / "home"))
    for name in ("PYTHONPATH", "DS_ENV_FILE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def called(programs, plan):
    def call(line):
        runners.run(plan(f"{BASE} {line}"))
        (entry,) = programs.calls()
        programs.record.unlink()
        assert entry["name"] == "deepspeed"
        return entry

    return call


TAIL = ["train.py"]
PORT = ["--master_port", "29500"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ["--no_local_rank", "--launcher", "pdsh", "--num_gpus", "2", *PORT]),
        ("--deepspeed_multinode_launcher slurm", ["--no_local_rank", "--launcher", "slurm", "--num_gpus", "2", *PORT]),
        # These refuse to be told a number.
        ("--deepspeed_multinode_launcher mpich", ["--no_local_rank", "--launcher", "mpich", *PORT]),
        ("--deepspeed_multinode_launcher mvapich", ["--no_local_rank", "--launcher", "mvapich", *PORT]),
        (
            "--deepspeed_multinode_launcher nossh --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 1234",
            [
                *("--node_rank", "1", "--no_ssh", "--no_local_rank", "--num_gpus", "2"),
                *("--master_addr", "10.0.0.1", "--master_port", "1234"),
            ],
        ),
        (
            "--deepspeed_inclusion_filter node1:0,1@node2:0,1",
            ["--no_local_rank", "--launcher", "pdsh", "--include", "node1:0,1@node2:0,1", *PORT],
        ),
    ],
)
def test_commands(called, line, expected):
    assert called(line)["arguments"] == ["--hostfile", "hosts", *expected, *TAIL]


def test_exclusion(called, written):
    written("hosts", "node1 slots=2\nnode2 slots=2\nnode3 slots=8")
    assert "node3" in called("--deepspeed_exclusion_filter node3")["arguments"]


def test_modules(called, written):
    written("train.py.py", "")
    assert called("--module")["arguments"][-2:] == ["--module", "train.py"]


def test_open_mpi_hears_the_names_of_variables(called, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "very secret")
    entry = called("--deepspeed_multinode_launcher openmpi --zero_stage 3")
    text = entry["arguments"][entry["arguments"].index("--launcher_args") + 1]
    names = text.split()[1::2]
    assert text.split()[::2] == ["-x"] * len(names)
    assert {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "HF_TOKEN", "MASTER_ADDR"} <= {*names}
    assert not {"HOME", "PYTHONPATH"} & {*names}
    assert entry["environment"]["MASTER_ADDR"] == "node1" and entry["environment"]["MASTER_PORT"] == "29500"
    assert "very secret" not in " ".join(entry["arguments"])


def test_variables_of_the_engine(called):
    environment = called("--zero_stage 2 --deepspeed_multinode_launcher slurm")["environment"]
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true" and environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    assert environment["PYTHONPATH"] == os.getcwd()
    settings = {
        "zero_stage": Resolved(3, Source.FILE),
        "mixed_precision": Resolved("bf16", Source.FILE),
        "gradient_clipping": Resolved(1.0, Source.COMMAND_LINE),
        "num_processes": Resolved(2, Source.FILE),
    }
    assert deepspeed.exports(settings, {})["ACCELERATE_CONFIG_DS_FIELDS"] == "zero_stage,mixed_precision"
    assert deepspeed.exports({}, {"PYTHONPATH": "/a"})["PYTHONPATH"] == f"/a{os.pathsep}{os.getcwd()}"


def test_pdsh_gets_a_private_file_and_users_files_stay(called, programs, written, monkeypatch):
    home = programs.folder.parent / "home"
    home.mkdir(exist_ok=True)
    (home / ".deepspeed_env").write_text("MINE=from home\n\nWANDB_API_KEY=given\n")
    written(".deepspeed_env", "MINE=from here")
    monkeypatch.setenv("HF_TOKEN", "very secret")
    monkeypatch.setenv("WANDB_API_KEY", "other")
    monkeypatch.setenv("SEVERAL_LINES", "a\nb")
    monkeypatch.setenv("ODD", 'a "b" $HOME `x` \\n 50%h')
    monkeypatch.setenv("PLAIN", "1%h")
    entry = called("--mixed_precision bf16")
    lines = entry["extra"].splitlines()
    assert "ACCELERATE_MIXED_PRECISION=bf16" in lines and "PLAIN=1%%h" in lines
    assert 'ODD=a \\"b\\" \\$HOME \\`x\\` \\\\n 50%%h' in lines
    # DeepSpeed lets later lines win.
    assert lines[-3:] == ["MINE=from home", "WANDB_API_KEY=given", "MINE=from here"]
    assert "secret" not in entry["extra"] and "SEVERAL_LINES" not in entry["extra"] and "\nHOME=" not in entry["extra"]
    assert entry["mode"] == 0o600 and not os.path.exists(entry["environment"]["DS_ENV_FILE"])
    assert pathlib.Path(".deepspeed_env").read_text() == "MINE=from here"


def test_what_was_held_back_is_said(programs, plan, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "very secret")
    runners.run(plan(BASE.replace("--quiet", "")))
    said = capsys.readouterr().err
    assert "not handed on to the other machines: HF_TOKEN" in said and "very secret" not in said


def test_file_is_gone_after_a_failure(programs, plan, monkeypatch):
    monkeypatch.setenv("FAKE_STATUS", "5")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        runners.run(plan(BASE))
    assert caught.value.returncode == 5
    assert not os.path.exists(programs.calls()[0]["environment"]["DS_ENV_FILE"])


def test_malformed_file_of_the_user(plan, written):
    written(".deepspeed_env", "export A")
    with pytest.raises(LaunchError, match=r"\.deepspeed_env holds 'export A'"):
        runners.run(plan(BASE))


def test_what_the_remote_shell_and_pdsh_would_read_is_quoted(called, plan, programs, parse):
    from accelerate.launch.resolve import resolve

    arguments = ["--a", "b c $x", "d;e", "%h", "plain", 'f "g']
    runners.run(resolve(_with_arguments(parse, arguments)))
    assert programs.calls()[0]["arguments"][-6:] == ["--a", "b c \\$x", "'d;e'", "%%h", "plain", 'f "g']


def _with_arguments(parse, arguments):
    args = parse(f"{BASE} train.py")
    args.training_script_args = arguments
    return args


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ("--deepspeed_multinode_launcher pdhs", "did you mean pdsh?"),
        ("--deepspeed_multinode_launcher zzz", "choose one of pdsh, standard"),
        ("--deepspeed_inclusion_filter node1 --deepspeed_exclusion_filter node2", "exclude each other"),
        ("--deepspeed_inclusion_filter node7", "names 'node7'"),
        ("--deepspeed_inclusion_filter node1:0,5@node2", "names slot 5 of node1"),
        ("--deepspeed_inclusion_filter node1:x@node2", "write host:0,1"),
        ("--deepspeed_inclusion_filter node1:0@node2", "the filter leaves 3 slots"),
        ("--deepspeed_inclusion_filter node1@node2 --deepspeed_multinode_launcher mpich", "filters do not work"),
        ("--num_machines 3 --num_processes 6", "--num_machines is 3, and 2 machines are left"),
        ("--num_processes 3", "multiple of --num_machines"),
        ("--num_processes 6", "node1 has 2 slots"),
        ("--num_processes 2 --deepspeed_multinode_launcher openmpi", "node1 has 2 slots"),
        ("--deepspeed_hostfile none", "there is no such file"),
        ("--deepspeed_hostfile plain", "has no slots"),
        ("--deepspeed_hostfile twice", "stands twice"),
        ("--deepspeed_multinode_launcher nossh", "needs --main_process_ip"),
        ("--deepspeed_multinode_launcher nossh --main_process_ip 1.2.3.4 --machine_rank 2", "it goes from 0 to 1"),
        ("--machine_rank 1", "Launch on machine 0 only"),
        ("--deepspeed_multinode_launcher slurm --module", "scripts only"),
        ("--max_restarts 2", "--max_restarts is an option of torch's"),
    ],
)
def test_refusals(plan, programs, written, line, fragment):
    written("plain", "node1\nnode2")
    written("twice", "node1 slots=2\nnode1 slots=2")
    written("train.py.py", "")
    with pytest.raises(LaunchError) as caught:
        runners.run(plan(f"{BASE} {line}"))
    assert fragment in str(caught.value)
    assert programs.calls() == []


def test_nobody_names_the_machines(plan):
    with pytest.raises(LaunchError, match="nobody names the machines"):
        runners.processes(plan(BASE.replace("--deepspeed_hostfile hosts", "")))


def test_what_is_not_installed(plan, programs, monkeypatch, tmp_path):
    (programs.folder / "pdsh").unlink()
    with pytest.raises(LaunchError, match="pdsh is not on the PATH"):
        runners.processes(plan(BASE))
    (programs.folder / "deepspeed").unlink()
    with pytest.raises(LaunchError, match="deepspeed is not on the PATH"):
        runners.processes(plan(BASE))
    (tmp_path / "packages" / "deepspeed" / "launcher" / "runner.py").write_text("older")
    for name in ("pdsh", "deepspeed"):
        programs.add(name)
    with pytest.raises(LaunchError, match="too old"):
        runners.processes(plan(BASE))
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(LaunchError, match=r"accelerate\[deepspeed\]"):
        runners.processes(plan(BASE))


def test_one_machine_and_standard_stay_with_torch(plan):
    assert plan("--use_deepspeed --cpu --num_processes 2").runner == "local"
    line = f"{BASE} --deepspeed_multinode_launcher standard --main_process_ip 127.0.0.1 --machine_rank 0"
    assert plan(line).runner == "machines"
