"""The call of mpirun, for each that there is; real ones run in tests/distributed/test_mpi.py."""

import os
import socket
import subprocess
import sys

import pytest

from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import Source

VERSIONS = {
    "openmpi": "mpirun (Open MPI) 4.1.4",
    "openmpi3": "mpirun.openmpi (OpenRTE) 4.1.4",
    "mpich": "HYDRA build details:\n    Version: 4.0.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.8",
    "mvapich": "HYDRA build details:\n  Configure options: '--prefix=/opt/mvapich2-2.3.7'",
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    for name in ("MASTER_ADDR", "MASTER_PORT", "CCL_WORKER_COUNT", "KMP_AFFINITY", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def called(programs, plan):
    """Launch with a fake mpirun, and return how it was called."""

    def call(line, maker="openmpi"):
        programs.add("mpirun", VERSIONS[maker])
        runners.run(plan(f"--cpu --quiet {line}"))
        (entry,) = programs.calls()
        programs.record.unlink()
        return entry["arguments"], entry["environment"]

    return call


def words(text):
    return text.split()


@pytest.mark.parametrize("maker", ["openmpi", "openmpi3"])
def test_open_mpi(called, written, maker):
    arguments, _ = called(f"--num_processes 2 --mpirun_hostfile {written('hosts', 'localhost slots=2')}", maker)
    assert arguments[:8] == words("--hostfile hosts --map-by ppr:2:node -n 2 --bind-to socket:overload-allowed")
    assert arguments[8:] == [sys.executable, "-u", "train.py"]


@pytest.mark.parametrize("maker", ["mpich", "intel", "mvapich"])
def test_hydra(called, written, maker):
    arguments, _ = called(f"--num_processes 2 --mpirun_hostfile {written('hosts', 'localhost:2')}", maker)
    assert arguments[:6] == words("-f hosts -ppn 2 -n 2") and arguments[-1] == "train.py"


def test_a_host_file_of_another_style_is_translated(called, written):
    mpich = called(f"--num_processes 2 --mpirun_hostfile {written('hosts', 'localhost slots=2')}", "mpich")[0]
    assert mpich[:6] == words("-hosts localhost -ppn 2 -n 2")
    ours = called(f"--num_processes 2 --mpirun_hostfile {written('hosts', 'localhost:2')}", "openmpi")[0]
    assert ours[:2] == ["--host", "localhost:2"]


def test_uneven_machines(called, written):
    name = written("hosts", "10.0.0.1 slots=2\n10.0.0.2 slots=1")
    line = f"--num_processes 3 --main_process_ip 10.0.0.1 --mpirun_hostfile {name}"
    assert called(line, "openmpi")[0][:4] == words("--host 10.0.0.1:2,10.0.0.2:1 -n 3")
    assert called(line, "mpich")[0][:4] == words("-hosts 10.0.0.1:2,10.0.0.2:1 -n 3")


def test_variables_reach_other_machines_by_their_names_alone(called, written, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "very secret")
    monkeypatch.setenv("MY_DATA", "here; there")
    name = written("hosts", "10.0.0.1\n10.0.0.2")
    line = f"--num_processes 4 --mixed_precision bf16 --main_process_ip 10.0.0.1 --mpirun_hostfile {name}"
    arguments, environment = called(line, "openmpi")
    given = [arguments[i + 1] for i, word in enumerate(arguments) if word == "-x"]
    assert {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "MY_DATA", "PATH"} <= {
        *given
    }
    assert not {"HOME", "PWD", "HOSTNAME", "OMPI_ALLOW_RUN_AS_ROOT"} & {*given}
    assert "very secret" not in " ".join(arguments) and environment["HF_TOKEN"] == "very secret"
    arguments, _ = called(line, "mpich")
    listed = arguments[arguments.index("-genvlist") + 1].split(",")
    assert {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= {*listed} and "HOME" not in listed
    assert "-genvlist" not in called(f"--num_processes 1 --mpirun_hostfile {written('one', 'localhost')}", "mpich")[0]


def test_meeting_point(called, written):
    arguments, environment = called(f"--num_processes 2 --mpirun_hostfile {written('hosts', 'localhost slots=2')}")
    assert environment["MASTER_ADDR"] == "127.0.0.1" and 0 < int(environment["MASTER_PORT"]) <= 65535
    name = written("hosts", "localhost\n192.0.2.7")
    assert called(f"--num_processes 2 --mpirun_hostfile {name}")[1]["MASTER_ADDR"] == socket.gethostname()
    name = written("hosts", "me@192.0.2.7\nlocalhost")
    environment = called(f"--num_processes 2 --mpirun_hostfile {name}")[1]
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("192.0.2.7", "29500")
    line = f"--num_processes 2 --main_process_ip 10.9.8.7 --main_process_port 1234 --mpirun_hostfile {name}"
    environment = called(line)[1]
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.9.8.7", "1234")


def test_workers_hear_mpirun_alone(called, written, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "0")
    environment = called(f"--num_processes 2 --mpirun_hostfile {written('hosts', 'localhost slots=2')}")[1]
    assert not {"RANK", "LOCAL_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "WORLD_SIZE"} & {*environment}


def test_threads_and_settings_of_intel(called, written, monkeypatch):
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    hosts = written("hosts", "localhost\n192.0.2.7")
    config = "distributed_type: MULTI_CPU\nmpirun_config: {mpirun_ccl: 3, mpirun_hostfile: hosts}\n"
    written("c.yaml", config)
    environment = called("--num_processes 4 --config_file c.yaml")[1]
    assert environment["CCL_WORKER_COUNT"] == "3" and environment["KMP_BLOCKTIME"] == "7"
    assert environment["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    # eight cores, and two processes on each machine
    assert environment["OMP_NUM_THREADS"] == "4"
    line = f"--num_processes 4 --num_cpu_threads_per_process 3 --mpirun_hostfile {hosts}"
    assert called(line)[1]["OMP_NUM_THREADS"] == "3"


def test_modules_and_programs(called, written):
    line = f"--num_processes 1 --mpirun_hostfile {written('hosts', 'localhost slots=1')}"
    written("train.py.py", "")
    assert called(f"{line} --module")[0][-4:] == [sys.executable, "-u", "-m", "train.py"]


def test_exit_status_is_kept(programs, plan, written, monkeypatch):
    programs.add("mpirun", VERSIONS["openmpi"])
    monkeypatch.setenv("FAKE_STATUS", "7")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        runners.run(plan(f"--cpu --quiet --num_processes 1 --mpirun_hostfile {written('hosts', 'localhost')}"))
    assert runners.failure_of(caught.value)[0] == 7


def test_root_must_be_allowed(programs, plan, written, monkeypatch):
    programs.add("mpirun", VERSIONS["openmpi"])
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    line = f"--cpu --quiet --num_processes 1 --mpirun_hostfile {written('hosts', 'localhost')}"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(LaunchError, match="OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"):
        runners.run(plan(line))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    runners.run(plan(line))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    programs.add("mpirun", VERSIONS["mpich"])
    runners.run(plan(line))
    assert len(programs.calls()) == 2


@pytest.mark.parametrize(
    ("line", "text", "fragment"),
    [
        ("--num_processes 3", "localhost slots=2", "has 2 slots"),
        ("--num_processes 2 --num_machines 2", "localhost slots=2", "--num_machines is 2"),
        ("--num_processes 2 --machine_rank 1", "localhost slots=2", "Launch on one machine only"),
        ("--num_processes 2 --max_restarts 1", "localhost slots=2", "--max_restarts is an option of torch's"),
        ("--num_processes 2 --log_dir x", "localhost slots=2", "--log_dir"),
        ("--num_processes 2", "", "names no machine"),
    ],
)
def test_refusals(programs, plan, written, line, text, fragment):
    programs.add("mpirun", VERSIONS["openmpi"])
    with pytest.raises(LaunchError) as caught:
        runners.run(plan(f"--cpu --quiet {line} --mpirun_hostfile {written('hosts', text)}"))
    assert fragment in str(caught.value)
    assert programs.calls() == []


def test_no_mpirun_and_an_unknown_one(programs, plan, written):
    request = plan(f"--cpu --num_processes 1 --mpirun_hostfile {written('hosts', 'localhost')}")
    with pytest.raises(LaunchError, match="mpirun is not on the PATH"):
        runners.processes(request)
    programs.add("mpirun", "something else 1.0")
    with pytest.raises(LaunchError, match="'something else 1.0'"):
        runners.processes(request)


def test_dry_run_starts_nothing(programs, plan, written):
    programs.add("mpirun", VERSIONS["openmpi"])
    request = plan(f"--cpu --num_processes 1 --mpirun_hostfile {written('hosts', 'localhost slots=1')}")
    (process,) = runners.processes(request)
    assert process.command[0] == "mpirun" and programs.calls() == []
    assert request.runner == "mpi" and request.settings["num_machines"].source <= Source.DEFAULT
