"""The machines of a run, from the variables that Slurm or an MPI launcher sets in this process.

If it has started one launch on each machine, each launch is a machine and starts its processes. If it has started several
on a machine, each launch is one process of the run: a task.

The sources are asked in this order; the first one that names several processes or machines counts:

1. torchrun's variables (RANK and WORLD_SIZE): then no other source is asked; the worker reads them.
2. jsrun, Open MPI, MPICH and Intel MPI, MVAPICH. Before Slurm, because they start their helpers through it and pass on the
   variables of the helper.
3. Slurm, in a step of `srun`.

MASTER_ADDR and MASTER_PORT, if set, are the meeting point of the machines. Nothing here uses the network or imports torch.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accelerate.base.environment import integer_in
from accelerate.extensions.slurm import mpi, variables
from accelerate.extensions.slurm.variables import Cluster
from accelerate.runtime.ranks import Ranks, checked, resolve

Environ = Mapping[str, str]
NAME = "Slurm"
_LOCAL = "127.0.0.1"


def ranks(environ: Environ) -> Ranks | None:
    """Return who this process is among those of an MPI launcher, or in a step of srun with several tasks; None elsewhere."""
    found = mpi.ranks(environ, _task)
    # Slurm does not confirm a WORLD_SIZE that was exported manually.
    return _task(environ) if found is None and (integer_in(environ, "WORLD_SIZE") or 1) <= 1 else found


def _task(environ: Environ) -> Ranks | None:
    step = variables.step(environ)
    if step is None:
        return None
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    return checked(NAME, names, [step.rank, step.size, step.local_rank, step.local_size])


def address(environ: Environ, ranks: Ranks) -> tuple[str, int] | None:
    """Return where processes meet: on the first node of a step or on this machine, at a port that all of them compute."""
    if ranks.source == NAME:
        host = variables.first_node(environ)
        return None if host is None else (host, variables.port(environ) or variables.PORTS[0])
    if ranks.source in mpi.SCHEMES and ranks.local_world_size in (None, ranks.world_size):
        port = None if environ.get("MASTER_PORT") else mpi.port(environ)
        return None if port is None else (_LOCAL, port)
    return None


def arrange(values: Mapping[str, Any], environ: Environ) -> Any:
    """Return what a launch takes from the scheduler, see `launching.arrange`; None if it has started nothing but this launch."""
    from accelerate.extensions.slurm import launching  # processes need only their ranks

    cluster = find(environ)
    return None if cluster is None else launching.arrange(cluster, values, environ)


def find(environ: Environ, hostname: str | None = None) -> Cluster | None:
    """Return a scheduler's view of the machines of a run; None if no source names more than this process.

    A single machine with notes is one of a job with more machines than this launch will use. A ValueError names a
    variable that is malformed or contradicts another one.
    """
    if environ.get("RANK", "").strip() and environ.get("WORLD_SIZE", "").strip():
        return None
    task = ranks({name: value for name, value in environ.items() if name != "WORLD_SIZE"})
    if task is None:
        cluster = _slurm_alone(environ)
    else:
        resolve(environ)  # a manual WORLD_SIZE must agree
        cluster = _srun(environ, task) if task.source == NAME else _mpi(environ, task, hostname)
    if cluster is None or (cluster.machines == 1 and cluster.task is None):
        return cluster
    # Many scripts of jobs set these two.
    host, port = environ.get("MASTER_ADDR", "").strip(), integer_in(environ, "MASTER_PORT")
    return replace(cluster, address=host or cluster.address, port=cluster.port if port is None else port)


def _srun(environ: Environ, task: Ranks) -> Cluster:
    """A launch, or a process, in a step of srun."""
    step = variables.step(environ)
    one_each = step.size == step.nodes
    leads = (step.node if one_each else step.rank) == 0
    address, node_name = variables.first_node(environ), environ.get("SLURMD_NODENAME")
    if step.nodes == 1:
        address = _LOCAL
    elif not one_each and environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        address = None  # then no variable says which node has task 0
    elif leads and node_name and node_name != address:
        address = None
    return Cluster(NAME, step.nodes, step.node, address, variables.port(environ), None if one_each else task)


def _slurm_alone(environ: Environ) -> Cluster | None:
    """A launch in a batch script, or in an interactive shell: it uses one node, perhaps of several."""
    tasks = integer_in(environ, "SLURM_STEP_NUM_TASKS") or 1
    nodes = integer_in(environ, "SLURM_JOB_NUM_NODES") or integer_in(environ, "SLURM_NNODES") or 1
    # Many steps of one task share an allocation, each with its own run.
    if nodes == 1 or (variables.in_step(environ) and tasks == 1):
        return None
    start = "`srun --ntasks-per-node=1 accelerate launch ...`"
    note = f"Slurm: the allocation has {nodes} nodes, and this launch uses one machine; start it on each with {start} to use all."
    return Cluster(NAME, 1, 0, None, None, None, (note,))


def _mpi(environ: Environ, task: Ranks, hostname: str | None) -> Cluster:
    """A launch, or a process, that mpirun or jsrun has started."""
    size, local_size = task.world_size, task.local_world_size
    port = mpi.port(environ)
    if local_size == size:
        return Cluster(task.source, 1, 0, _LOCAL, port, task)
    listed = environ.get("SLURM_JOB_NODELIST", "").strip()
    hosts = variables.hosts(listed, "SLURM_JOB_NODELIST") if listed else []
    counted = integer_in(environ, "OMPI_MCA_orte_num_nodes") if task.source == "Open MPI" else None
    # If no source has counted the machines, the others are assumed to equal this one.
    machines = counted or (-(-size // local_size) if local_size else 1)
    # Fewer hosts than launches: another machine has several.
    one_each = local_size == 1 and machines == size and not 0 < len(hosts) < size
    if hosts:
        address, away = hosts[0], environ.get("SLURMD_NODENAME") in hosts[1:]
        machines = machines if one_each else min(machines, len(hosts))
    else:
        address, away = _mpirun_host(environ, hostname) if task.source == "Open MPI" else (None, False)
    if task.rank == 0 and away:
        address = None
    machine_rank, process = (task.rank, None) if one_each else (None, task)
    return Cluster(task.source, machines, machine_rank, address, port, process)


def _mpirun_host(environ: Environ, hostname: str | None) -> tuple[str | None, bool]:
    """Return the machine of Open MPI's mpirun, which takes rank 0 if it takes any, and whether this is another one."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if match := re.search(r"tcp://([0-9.]+)[,:]|tcp6://\[([0-9A-Fa-f:.]+)[],]", uri):
        return match[1] or match[2], environ.get("OMPI_MCA_orte_local_daemon_uri", uri) != uri
    if match := re.fullmatch(r"prterun-(.+)-[0-9]+@[0-9]+", environ.get("PMIX_NAMESPACE", "")):
        # One of the names may have the domain, and the other not.
        hostname_here = environ.get("PMIX_HOSTNAME") or hostname or socket.gethostname()
        return match[1], match[1].lower().partition(".")[0] != hostname_here.lower().partition(".")[0]
    return None, False
