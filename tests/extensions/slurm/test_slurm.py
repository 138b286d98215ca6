"""A Slurm cluster of two nodes on this host, for real: srun, sbatch and scancel start and end `accelerate launch`."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from accelerate.utils.other import get_free_port
from distributed.conftest import LAUNCH_ON_CPU as LAUNCH
from distributed.conftest import LIMIT_S, begun, done, gone, plain_environment, stop, until

pytestmark = pytest.mark.cold

# Addresses of this host, so that the names of the nodes can be found without a name server.
NODES = ("127.0.0.1", "127.0.0.2")
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "squeue")
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from accelerate import Accelerator

accelerator = Accelerator()
together = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
local = f"{accelerator.local_process_index} of {os.environ.get('LOCAL_WORLD_SIZE', 1)}"
line = f"rank {accelerator.process_index} local {local} on {os.environ['SLURMD_NODENAME']} all {together}"
print(line + "\\n", end="", flush=True)
what = sys.argv[1] if len(sys.argv) > 1 else ""
if what == "fail" and accelerator.is_last_process:
    sys.exit(7)
if what == "stay":
    accelerator.wait_for_everyone()
    Path(f"here{accelerator.process_index}").write_text(str(os.getpid()))
    time.sleep(600)
"""
WAYS = [("-n2", *LAUNCH), ("-N2", "--ntasks-per-node=1", *LAUNCH, "--num_processes", "2")]
TASKS_OR_MACHINES = pytest.mark.parametrize("words", WAYS, ids=["tasks", "machines"])
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
KillWait=5
# Heterogeneous jobs start with the next round of this scheduler, half a minute apart by default.
SchedulerParameters=bf_interval=1,sched_interval=1
"""


class Slurm:
    """A cluster that is up, and a folder to run in."""

    def __init__(self, configuration: Path, folder: Path) -> None:
        self.folder = folder
        self.environment = plain_environment(folder, SLURM_CONF=str(configuration), OMP_NUM_THREADS="1")
        (folder / "script.py").write_text(SCRIPT)

    def run(self, *command: str) -> subprocess.CompletedProcess:
        return done(command, cwd=self.folder, env=self.environment)

    def start(self, *command: str) -> subprocess.Popen:
        with open(self.folder / "said", "w") as said:
            streams = {"stdout": said, "stderr": subprocess.STDOUT}
            return begun(command, cwd=self.folder, env=self.environment, **streams)


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start the daemons; the tests skip where that cannot be done."""
    # Debian keeps the daemons where not everybody looks.
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    programs = {name: shutil.which(name, path=path) for name in PROGRAMS}
    missing = sorted(name for name, found in programs.items() if found is None)
    if missing:
        pytest.skip(f"needs Slurm on this machine (Debian: slurm-wlm); there is no {', '.join(missing)}")
    if os.geteuid():
        pytest.skip("needs root: slurmd starts the tasks of its users")
    # A short path: Slurm's own files in it become addresses of sockets.
    folder = tmp_path_factory.mktemp("slurm")
    file = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    lines = [CONFIGURATION.format(host=host, port=get_free_port(), user="root", folder=folder)]
    lines += [f"NodeName={n} NodeHostname={host} NodeAddr=127.0.0.1 Port={get_free_port()} CPUs=4" for n in NODES]
    lines.append(f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP\n")
    file.write_text("\n".join(lines))
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    commands = [[programs["slurmctld"], "-D"], *([programs["slurmd"], "-D", "-N", node] for node in NODES)]
    environment = {**os.environ, "SLURM_CONF": str(file)}
    daemons = []

    def nodes_are_ready() -> bool:
        assert all(daemon.poll() is None for daemon in daemons), "a daemon has ended"
        asked = done([programs["sinfo"], "-h", "-o", "%T %D"], env=environment)
        return asked.stdout.strip() == f"idle {len(NODES)}"

    try:
        for number, command in enumerate(commands):
            with open(folder / f"daemon{number}", "w") as said:
                daemons.append(subprocess.Popen(command, stdout=said, stderr=said, env=environment))
        try:
            until(nodes_are_ready, "the nodes are ready", 40)
        except AssertionError as problem:
            said = "\n".join((folder / f"daemon{number}").read_text()[-300:] for number in range(len(commands)))
            pytest.skip(f"Slurm does not run here: {problem}\n{said}")
        yield file
    finally:
        stop(reversed(daemons))


@pytest.fixture
def slurm(configuration: Path, tmp_path: Path) -> Iterator[Slurm]:
    cluster = Slurm(configuration, tmp_path)
    yield cluster
    cluster.run("scancel", "--full", "--user", "root")
    until(lambda: not cluster.run("squeue", "-h").stdout, "jobs are gone")


def ranks(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("rank "))


def test_tasks_of_srun_are_the_processes_and_one_task_a_node_starts_those_of_the_node(slurm):
    for words, count in ((("-n2", *LAUNCH), 2), (("-N2", "--ntasks-per-node=1", *LAUNCH, "--num_processes", "4"), 4)):
        ended = slurm.run("srun", *words, "script.py")
        assert ended.returncode == 0, ended.stderr
        where = [f"rank {rank} local {rank % 2} of 2 on {NODES[rank // 2]}" for rank in range(count)]
        assert ranks(ended.stdout) == [f"{line} all {list(range(count))}" for line in where]


@pytest.mark.slow
@TASKS_OR_MACHINES
def test_the_exit_status_of_a_process_is_that_of_srun(slurm, words):
    ended = slurm.run("srun", *words, "script.py", "fail")
    assert ended.returncode == 7, ended.stderr


@pytest.mark.slow
def test_a_batch_script_uses_its_own_node_and_says_so(slurm):
    (slurm.folder / "job").write_text(f"#!/bin/bash\n{' '.join(LAUNCH)} --num_processes 2 script.py fail\n")
    ended = slurm.run("sbatch", "-W", "-N2", "-n2", "-o", "said", "job")
    said = (slurm.folder / "said").read_text()
    assert ended.returncode == 7, said
    assert len(ranks(said)) == 2 and "all [0, 1]" in said
    assert "the allocation has 2 nodes" in said and "srun --ntasks-per-node=1 accelerate launch" in said


@pytest.mark.slow
@TASKS_OR_MACHINES
def test_scancel_ends_all_processes(slurm, words):
    srun = slurm.start("srun", *words, "script.py", "stay")
    files = [slurm.folder / f"here{rank}" for rank in range(2)]
    try:
        until(lambda: all(file.exists() and file.read_text() for file in files), "both processes are up", LIMIT_S)
        processes = [psutil.Process(int(file.read_text())) for file in files]
        assert slurm.run("scancel", "--full", "--user", "root").returncode == 0
        assert srun.wait(timeout=60) != 0
        gone(processes)
    finally:
        srun.kill()
        srun.wait()
