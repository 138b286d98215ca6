"""The call of mpirun, for each that there is, and the host files; real ones run in tests/distributed/test_mpi.py."""

import socket
import sys

import pytest

from accelerate.extensions.mpi import runner as mpi
from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import Source
from cases import cases

VERSIONS = {
    "openmpi": "mpirun (Open MPI) 4.1.4",
    "openmpi3": "mpirun.openmpi (OpenRTE) 4.1.4",
    "mpich": "HYDRA build details:\n    Version: 4.0.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.8",
    "mvapich": "HYDRA build details:\n  Configure options: '--prefix=/opt/mvapich2-2.3.7'",
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "CCL_WORKER_COUNT", "KMP_AFFINITY", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hosts(written):
    """Write a host file and return the option that names it."""
    return lambda text: f"--mpirun_hostfile {written('hosts', text)}"


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


@cases(
    "makers, text, count, words",
    ("openmpi openmpi3", "localhost slots=2", 2, "--host localhost:2 --bind-to socket:overload-allowed -n 2"),
    ("openmpi", "192.0.2.1 slots=2\n192.0.2.2 slots=1", 3, "--host 192.0.2.1:2,192.0.2.2:1"),
    ("mpich intel mvapich", "localhost:2", 2, "-hosts localhost -ppn 2 -n 2"),
    ("mpich", "192.0.2.1 slots=2\n192.0.2.2 slots=2", 4, "-hosts 192.0.2.1,192.0.2.2 -ppn 2"),
    ("mpich", "192.0.2.1 slots=2\n192.0.2.2 slots=1", 3, "-hosts 192.0.2.1:2,192.0.2.2:1"),
    ("mpich", "192.0.2.1\n192.0.2.2\n192.0.2.1", 3, "-hosts 192.0.2.1:2,192.0.2.2:1"),
    ("openmpi", "2001:db8::1\n2001:db8::2", 4, "--hostfile hosts --map-by ppr:2:node --bind-to"),
    ("mpich", "2001:db8::1 slots=2\n2001:db8::2 slots=1", 3, "-f hosts -genvlist"),
)
def test_each_mpirun_is_called_in_its_words(called, hosts, makers, text, count, words):
    for maker in makers.split():
        arguments, _ = called(f"--num_processes {count} {hosts(text)}", maker)
        assert arguments[: len(words.split())] == words.split()
        assert arguments[-5:] == ["-n", str(count), sys.executable, "-u", "train.py"]


def test_variables_reach_other_machines_by_their_names_alone(called, hosts, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "very secret")
    monkeypatch.setenv("MY_DATA", "here; there")
    two = hosts("10.0.0.1\n10.0.0.2")
    line = f"--num_processes 4 --mixed_precision bf16 --main_process_ip 10.0.0.1 {two}"
    arguments, environment = called(line, "openmpi")
    given = {arguments[i + 1] for i, word in enumerate(arguments) if word == "-x"}
    ours = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "MY_DATA", "PATH"}
    assert ours <= given and not {"HOME", "PWD", "HOSTNAME"} & given
    assert "very secret" not in " ".join(arguments) and environment["HF_TOKEN"] == "very secret"
    arguments, _ = called(line, "mpich")
    listed = arguments[arguments.index("-genvlist") + 1].split(",")
    assert ours <= {*listed} and "HOME" not in listed
    assert "-genvlist" not in called(f"--num_processes 1 {hosts('localhost')}", "mpich")[0]


def test_address_and_port(called, hosts):
    environment = called("--num_processes 2 " + hosts("localhost\n192.0.2.7"))[1]
    assert environment["MASTER_ADDR"] == socket.gethostname()
    for options, expected in (
        ("", ("192.0.2.7", "29500")),
        ("--main_process_ip 10.9.8.7 --main_process_port 1234", ("10.9.8.7", "1234")),
    ):
        environment = called(f"--num_processes 2 {options} " + hosts("me@192.0.2.7\nlocalhost"))[1]
        assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == expected


def test_threads_and_settings_of_intel(called, hosts, written, monkeypatch):
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    option = hosts("localhost\n192.0.2.7")
    written("c.yaml", "distributed_type: MULTI_CPU\nmpirun_config: {mpirun_ccl: 3, mpirun_hostfile: hosts}\n")
    environment = called("--num_processes 4 --config_file c.yaml")[1]
    assert environment["CCL_WORKER_COUNT"] == "3" and environment["KMP_BLOCKTIME"] == "7"
    assert environment["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    assert environment["OMP_NUM_THREADS"] == "4"  # eight cores, and two processes on each machine
    line = f"--num_processes 4 --num_cpu_threads_per_process 3 {option}"
    assert called(line)[1]["OMP_NUM_THREADS"] == "3"


def test_dry_run_starts_nothing_and_needs_a_known_mpirun(programs, plan, hosts):
    request = plan(f"--cpu --num_processes 1 {hosts('localhost slots=1')}")
    with pytest.raises(LaunchError, match="mpirun is not on the PATH"):
        runners.process(request)
    programs.add("mpirun", "something else 1.0")
    with pytest.raises(LaunchError, match="'something else 1.0'"):
        runners.process(request)
    programs.add("mpirun", VERSIONS["openmpi"])
    process = runners.process(request)
    assert process.command[0] == "mpirun" and programs.calls() == []
    assert request.runner == "mpi" and request.settings["num_machines"].source <= Source.DEFAULT
    with pytest.raises(LaunchError, match="Launch on one machine only"):
        runners.process(plan(f"--cpu --machine_rank 1 {hosts('localhost')}"))
    with pytest.raises(LaunchError, match="--max_restarts is an option of torch's"):
        runners.process(plan(f"--cpu --max_restarts 1 {hosts('localhost')}"))


@cases(
    "text, expected",
    ("a slots=2\nme@b.c slots=3 max_slots=4\n", {"a": 2, "me@b.c": 3}),
    ("a:2\nb:1 # comment\n\n# all\n", {"a": 2, "b": 1}),
    ("\ta  max_slots=3 slots=2\r\n10.0.0.1 user=x", {"a": 2, "10.0.0.1": None}),
    ("# only a comment\n\n", "names no machine"),
    ("a slots=two", "Line 1 of hosts (--x) is 'a slots=two'"),
    ("-oProxyCommand=evil", "Line 1"),
    ("$(id) slots=1", "Line 1"),
    ("a slots=2\nb:1\na slots=3\na", {"a": 6, "b": 1}),  # a machine on several lines
    ("a\nb\na\nc\n", {"a": 2, "b": 1, "c": 1}),
    ("\ufeffa slots = 2 max-slots=4 sockets=2\n", {"a": 2}),
    ("a:2:hca1\n", {"a": 2}),
    (
        "fe80::1%eth0 slots=2\nme@[2001:db8::2]:3\n::1\n[::2]\n",
        {"fe80::1%eth0": 2, "me@2001:db8::2": 3, "::1": None, "::2": None},
    ),
    ("1:2:3::4::5 slots=2", "Line 1 of hosts (--x)"),
    ("a slots=0\n", "Line 1 of hosts (--x)"),
    (None, "--x: the host file cannot be read"),
)
def test_host_files(found_or_refused, written, text, expected):
    path = "nowhere" if text is None else written("hosts", text)
    found_or_refused(expected, mpi.read_hosts, path, "--x")


@cases(
    "hosts, count, machines, expected",
    ({"a": 2, "b": 2}, 2, None, {"a": 2}),
    ({"a": 2, "b": 2}, 2, 2, {"a": 1, "b": 1}),
    ({"a": 4, "b": 2, "c": 9}, 4, 3, {"a": 4}),
    ({"a": None, "b": None}, 4, None, {"a": 2, "b": 2}),
    ({"a": 2}, 2, 2, "--num_machines is 2, and --mpirun_hostfile names 1"),
    ({"a": 2, "b": 1}, 4, None, "has 3 slots on 2 machines"),
    ({"a": None, "b": None}, 3, None, "does not divide evenly over the 2 machines"),
)
def test_layout(found_or_refused, hosts, count, machines, expected):
    found_or_refused(expected, mpi.layout, hosts, count, machines)
