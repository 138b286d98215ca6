"""Ranks from the variables of Slurm and of MPI launchers, and the port of an mpirun."""

import os
from types import SimpleNamespace

import psutil
import pytest

from accelerate.extensions.slurm import mpi
from accelerate.runtime import ranks
from accelerate.runtime.ranks import Ranks, resolve

SLURM = "STEP_ID=0 NTASKS=5 PROCID=3 LOCALID=0 NODEID=1 STEP_TASKS_PER_NODE=3,2"
SLURM = dict(f"SLURM_{pair}".split("=") for pair in SLURM.split())


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        *[(dict(zip(names, "2412", strict=True)), Ranks(2, 4, 1, 2, source)) for source, names in mpi.SCHEMES.items()],
        (SLURM, Ranks(3, 5, 0, 2, "Slurm")),
        # mpirun with a WORLD_SIZE exported manually
        ({"WORLD_SIZE": "2", "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, Ranks(1, 2, 1, None, "MPI")),
        # torchrun inside an MPI or Slurm allocation is believed first; alone manually as well
        ({"RANK": "0", "WORLD_SIZE": "2", "PMI_RANK": "1", "PMI_SIZE": "8"}, Ranks(0, 2, 0, None, "torchrun")),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "1"}, Ranks(0, 1, 0, None, "torchrun")),
    ],
)
def test_launchers(environ, found):
    assert resolve(environ) == found


def test_no_launcher():
    batch_script = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}
    interactive_shell = {**SLURM, "SLURM_NTASKS": "1"}
    for environ in ({"PMI_RANK": "0", "PMI_SIZE": "1"}, batch_script, interactive_shell):
        assert resolve(environ) is None, environ


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "3", "PMI_RANK": "0", "PMI_SIZE": "2"}, "WORLD_SIZE is 3 but PMI_SIZE is 2"),
        ({**SLURM, "WORLD_SIZE": "5"}, "WORLD_SIZE is 5 but RANK is not set"),
    ],
)
def test_a_size_that_nothing_confirms_is_refused(environ, message):
    with pytest.raises(ValueError, match=message):
        resolve(environ)


@pytest.fixture
def helper(monkeypatch):
    """Let this process descend from a wrapper, and that from a program with these arguments."""

    def make(*words):
        commands = [["bash", "wrapper"], list(words), ["init"]]
        ancestors = [SimpleNamespace(cmdline=lambda command=command: command) for command in commands]
        monkeypatch.setattr(psutil.Process, "parents", lambda self: ancestors)
        return mpi.port({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_JOB_ID": "7"})

    return make


def test_runs_of_hydra_are_told_apart_by_the_address_of_their_mpirun(helper):
    # Seen: MPICH 4.0, `mpirun.mpich -np 2`.
    mpich = ("/usr/bin/hydra_pmi_proxy", "--control-port", "a:41405", "--rmk", "user", "--proxy-id")
    port = helper(*mpich, "0")
    assert port in range(20000, 32768) and port == helper(*mpich, "1") == mpi.port_of("a:41405")
    assert port != helper("/usr/bin/hydra_pmi_proxy", "--control-port", "a:41406", "--rmk", "user")
    intel = helper("hydra_bstrap_proxy", "--upstream-host", "a", "--upstream-port", "41405", "--pgid", "0")
    assert intel == port
    of_job = mpi.job_port({"SLURM_JOB_ID": "7"})
    assert helper("python", "--control-port", "a:1") == helper("hydra_pmi_proxy", "--control-port") == of_job != port


@pytest.mark.parametrize(("source", "port"), [("Open MPI", 26082), ("torchrun", 29500)])
def test_only_a_run_of_mpirun_has_a_port_of_its_own(monkeypatch, source, port):
    monkeypatch.setenv("PMIX_NAMESPACE", "2071330817")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    for name in (*ranks.VARIABLES, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    ranks.export(Ranks(1, 2, 1, 2, source))
    assert os.environ["MASTER_PORT"] == str(port)
