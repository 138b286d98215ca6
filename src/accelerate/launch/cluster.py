"""What a scheduler or an MPI launcher says about the machines of a run, in the variables of this process.

Where it has started one launch on each machine, each launch is a machine and starts the processes of it. Where it has started
several on a machine, each launch is one process of the run: a task.

Asked in this order, the first one that speaks of several processes or machines answers:

1. torchrun's variables (RANK and WORLD_SIZE): then nothing else is asked; the worker reads them.
2. jsrun, Open MPI, MPICH and Intel MPI, MVAPICH. Before the schedulers, because they start their helpers through these and pass
   on the variables of the helper.
3. Slurm, in a step of `srun`.
4. PBS and LSF, by the list of their hosts and the name of this one.

MASTER_ADDR and MASTER_PORT, where they are set, say where the machines meet. Nothing here asks the network or imports torch.
"""

import os
import pathlib
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from accelerate.runtime import ranks, slurm
from accelerate.runtime.ranks import Ranks

Environ = Mapping[str, str]
_LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class Cluster:
    """What a scheduler says; `source` is its name, for people.

    Attributes:
        machine_rank: which machine this is, from 0; None for a task where no variable says.
        address: of machine 0, or of the process with rank 0; None where no variable says.
        port: a port that all of them compute alike from the number of the job; None without such a number.
        task: which process this is, where each process has been started by itself: the launcher starts that one only.
        notes: lines for the user.
    """

    source: str
    machines: int
    machine_rank: int | None
    address: str | None
    port: int | None
    task: Ranks | None
    notes: tuple[str, ...] = ()


def _in_file(path: str) -> Iterable[str]:
    """Hosts of a file, one in each line; none where it is no file on this machine."""
    return pathlib.Path(path).read_text("utf-8", "replace").split() if os.path.isfile(path) else ()


def _in_pairs(text: str) -> Iterable[str]:
    """Hosts and their numbers of slots in turn; that a host has one slot or more is all that matters here."""
    for host, count in re.findall(r"(\S+)\s+(\d+)", text):
        yield from [host] * (1 if count == "1" else 2)


@dataclass(frozen=True)
class _Scheduler:
    """How a scheduler describes a job.

    Attributes:
        number: the variable with the number of the job.
        lists: the variables with its hosts, the best first, and what turns their text into one entry for each slot.
        start: how one launch is started on each host.
        is_script: whether this launch runs in the job's script, which runs on the first host alone.
    """

    name: str
    number: str
    lists: Mapping[str, Callable[[str], Iterable[str]]]
    start: str
    is_script: Callable[[Environ], bool] = lambda environ: True


_SLURM = _Scheduler(
    "Slurm",
    "SLURM_JOB_ID",
    dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), slurm.hosts),
    "`srun --ntasks-per-node=1 accelerate launch ...`",
)
_PBS = _Scheduler(
    "PBS",
    "PBS_JOBID",
    {"PBS_NODEFILE": _in_file},
    "`pbsdsh -- accelerate launch ...` (Torque: `pbsdsh -u accelerate launch ...`)",
    # The script is task 1. ssh passes on no variables but those that its user names.
    lambda environ: bool(environ.get("PBS_ENVIRONMENT")) and environ.get("PBS_TASKNUM", "1") == "1",
)
_LSF = _Scheduler(
    "LSF",
    "LSB_JOBID",
    {"LSB_DJOB_HOSTFILE": _in_file, "LSB_MCPU_HOSTS": _in_pairs},
    '`blaunch -z "HOST1 HOST2 ..." accelerate launch ...`',
    lambda environ: "LSF_PM_TASKID" not in environ,
)
_SCHEDULERS = (_SLURM, _PBS, _LSF)


def find(environ: Environ, hostname: str | None = None) -> Cluster | None:
    """Return what a scheduler says about the machines of a run; None where nothing speaks of more than this process.

    A single machine with notes is one of a job with more machines than this launch will use. A ValueError names a
    variable that is malformed or contradicts another one.
    """
    if environ.get("RANK", "").strip() and environ.get("WORLD_SIZE", "").strip():
        return None
    hostname = hostname or socket.gethostname()
    task = ranks.resolve({name: value for name, value in environ.items() if name not in ("RANK", "WORLD_SIZE")})
    if task is None:
        found = _slurm_alone(environ) if environ.get("SLURM_JOB_ID", "").strip() else _by_host(environ, hostname)
    else:
        ranks.resolve(environ)  # a WORLD_SIZE by hand must agree
        found = _srun(environ, task) if task.source == "Slurm" else _mpi(environ, task, hostname)
    if found is None or (found.machines == 1 and found.task is None):
        return found
    # Many scripts of jobs set these two.
    host, port = environ.get("MASTER_ADDR", "").strip(), slurm.integer(environ, "MASTER_PORT")
    return replace(found, address=host or found.address, port=found.port if port is None else port)


def _srun(environ: Environ, task: Ranks) -> Cluster:
    """A launch, or a process, in a step of srun."""
    step = slurm.step(environ)
    one_each = step.size == step.nodes
    leads = (step.node if one_each else step.rank) == 0
    address, own = slurm.first_node(environ), environ.get("SLURMD_NODENAME")
    if step.nodes == 1:
        address = _LOCAL
    elif not one_each and environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        address = None  # then no variable says which node has task 0
    elif leads and own and own != address:
        address = None
    return Cluster("Slurm", step.nodes, step.node, address, slurm.port(environ), None if one_each else task)


def _slurm_alone(environ: Environ) -> Cluster | None:
    """A launch in a batch script, or in an interactive shell: it uses one node, perhaps of several."""
    tasks = slurm.integer(environ, "SLURM_STEP_NUM_TASKS") or 1
    nodes = slurm.integer(environ, "SLURM_JOB_NUM_NODES") or slurm.integer(environ, "SLURM_NNODES") or 1
    # Many steps of one task share an allocation, each with a run of its own.
    if nodes == 1 or (slurm.in_step(environ) and tasks == 1):
        return None
    return _alone(_SLURM, f"the allocation has {nodes} nodes")


def _by_host(environ: Environ, hostname: str) -> Cluster | None:
    """Number the launches on the hosts of a job of PBS or LSF."""
    scheduler, slots = _job(environ)
    hosts = list(slots)
    if len(hosts) < 2:
        return None
    position = _position(hosts, hostname)
    if position is None or (position == 0 and scheduler.is_script(environ)):
        some = ", ".join([*hosts[:4], *(["..."] if len(hosts) > 4 else [])])
        stranger = f", and {hostname} is none of them" if position is None else ""
        return _alone(scheduler, f"the job has {len(hosts)} hosts ({some}){stranger}")
    port = ranks.job_port(environ, (scheduler.number,))
    return Cluster(scheduler.name, len(hosts), position, hosts[0], port, None)


def _alone(scheduler: _Scheduler, what: str) -> Cluster:
    note = f"{scheduler.name}: {what}, and this launch uses one machine; start it on each with {scheduler.start} to use all."
    return Cluster(scheduler.name, 1, 0, None, None, None, (note,))


def _mpi(environ: Environ, task: Ranks, hostname: str) -> Cluster:
    """A launch, or a process, that mpirun or jsrun has started."""
    size, here = task.world_size, task.local_world_size
    port = ranks.mpi_port(environ)
    if here == size:
        return Cluster(task.source, 1, 0, _LOCAL, port, task)
    scheduler, slots = _job(environ)
    hosts = list(slots)
    if task.source == "jsrun" and scheduler is _LSF:  # the node that jsrun itself runs on has one slot
        hosts = [host for host in hosts if slots[host] > 1] or hosts
    counted = slurm.integer(environ, "OMPI_MCA_orte_num_nodes") if task.source == "Open MPI" else None
    # Where nothing has counted the machines, the others are taken to be like this one.
    machines = counted or (-(-size // here) if here else 1)
    # Fewer hosts than launches: another machine has several.
    one_each = here == 1 and machines == size and not 0 < len(hosts) < size
    if hosts:
        address = hosts[0]
        own = environ.get("SLURMD_NODENAME", "") if scheduler is _SLURM else hostname
        away = _position(hosts, own) not in (0, None)
        machines = machines if one_each else min(machines, len(hosts))
    else:
        address, away = _mpirun_host(environ, hostname)
    if task.rank == 0 and away:
        address = None
    machine_rank, process = (task.rank, None) if one_each else (None, task)
    return Cluster(task.source, machines, machine_rank, address, port, process)


def _mpirun_host(environ: Environ, hostname: str) -> tuple[str | None, bool]:
    """Return the machine of Open MPI's mpirun, which takes rank 0 if it takes any, and whether this is another one."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if match := re.search(r"tcp://([0-9.]+)[,:]|tcp6://\[([0-9A-Fa-f:.]+)[],]", uri):
        return match[1] or match[2], environ.get("OMPI_MCA_orte_local_daemon_uri", uri) != uri
    if match := re.fullmatch(r"prterun-(.+)-[0-9]+@[0-9]+", environ.get("PMIX_NAMESPACE", "")):
        return match[1], not _same_host(match[1], environ.get("PMIX_HOSTNAME") or hostname)
    return None, False


def _job(environ: Environ) -> tuple[_Scheduler | None, Mapping[str, int]]:
    """Return the first scheduler that lists hosts, and these in its order with their slots; None and no hosts for none."""
    for scheduler in _SCHEDULERS:
        if not environ.get(scheduler.number, "").strip():
            continue
        for variable, parse in scheduler.lists.items():
            text = environ.get(variable, "").strip()
            if text and (slots := Counter(parse(text))):
                return scheduler, slots
    return None, {}


def _position(hosts: list[str], own: str) -> int | None:
    return next((position for position, host in enumerate(hosts) if _same_host(host, own)), None)


def _same_host(one: str, other: str) -> bool:
    """Compare names, one of which may have the domain and the other not."""
    one, other = one.lower().rstrip("."), other.lower().rstrip(".")
    (short, domain), (other_short, other_domain) = (name.partition(".")[::2] for name in (one, other))
    return one == other or (short == other_short and not (domain and other_domain) and not short.isdecimal())
