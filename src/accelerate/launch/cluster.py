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

from accelerate.launch.errors import LaunchError
from accelerate.runtime import ranks, slurm
from accelerate.runtime.ranks import Ranks

Environ = Mapping[str, str]
_LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class Cluster:
    """What a scheduler says.

    Attributes:
        source: who says it: "Slurm", "Open MPI", "MPI", "MVAPICH", "PBS", "LSF" or "jsrun".
        machines: how many machines take part.
        machine_rank: which of them this is, from 0; None for a task where no variable says.
        address: name or address of machine 0, or of the process with rank 0; None where no variable says.
        port: a port that all of them compute alike from the number of the job; None without such a number.
        task: which process this is, where each process has been started by itself: the launcher starts that one only.
        detail: the variables that said so.
        notes: lines for the user.
        cpus_per_task: how many CPUs were asked for each launch, whether or not this process is bound to them.
        no_address: why there is no address, as a sentence, where there is something to say.
    """

    source: str
    machines: int
    machine_rank: int | None
    address: str | None
    port: int | None
    task: Ranks | None
    detail: str
    notes: tuple[str, ...] = ()
    cpus_per_task: int | None = None
    no_address: str = ""


def _in_file(path: str, name: str) -> Iterable[str]:
    """Hosts of a file, one in each line; none where it is no file on this machine."""
    if not os.path.isfile(path):
        return ()
    return pathlib.Path(path).read_text("utf-8", "replace").split()


def _in_words(text: str, name: str) -> Iterable[str]:
    return text.split()


def _in_pairs(text: str, name: str) -> Iterable[str]:
    """Hosts and their numbers of slots in turn; that a host has one slot or more is all that matters here."""
    words = text.split()
    try:
        return [host for host, count in zip(words[::2], words[1::2], strict=True) for _ in range(min(int(count), 2))]
    except ValueError:
        raise LaunchError(
            f"{name} is {text[:200]!r}; a host and its number of slots stand there in turn, such as 'host1 4 host2 4'. "
            "Correct or unset it."
        ) from None


@dataclass(frozen=True)
class _Scheduler:
    """How a scheduler describes a job.

    Attributes:
        name: the scheduler.
        number: the variable with the number of the job.
        lists: the variables that list its hosts, the best first, and what turns their text into one entry for each slot.
        start: how one launch is started on each host.
        is_script: whether this launch runs in the job's script, which runs on the first host alone.
    """

    name: str
    number: str
    lists: Mapping[str, Callable[[str, str], Iterable[str]]]
    start: str
    is_script: Callable[[Environ], bool] = lambda environ: True


_SLURM = _Scheduler(
    "Slurm",
    "SLURM_JOB_ID",
    {"SLURM_JOB_NODELIST": slurm.some_hosts, "SLURM_NODELIST": slurm.some_hosts},
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
    {"LSB_DJOB_HOSTFILE": _in_file, "LSB_MCPU_HOSTS": _in_pairs, "LSB_HOSTS": _in_words},
    '`blaunch -z "HOST1 HOST2 ..." accelerate launch ...`',
    lambda environ: "LSF_PM_TASKID" not in environ,
)
_SCHEDULERS = (_SLURM, _PBS, _LSF)


@dataclass(frozen=True)
class _Job:
    """The hosts of a job in the scheduler's order, with their slots, and the variable that lists them."""

    scheduler: _Scheduler
    variable: str
    slots: Mapping[str, int]

    @property
    def hosts(self) -> list[str]:
        return list(self.slots)


def find(environ: Environ, hostname: str | None = None) -> Cluster | None:
    """Return what a scheduler says about the machines of a run.

    Args:
        environ: the variables.
        hostname: the name of this machine; None asks the system.

    Returns:
        None where nothing speaks of more than this one process. A single machine with notes where a job has more machines than
        this launch will use.

    Raises:
        LaunchError: a variable is malformed or contradicts another one.

    Example:
        >>> step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
        >>> found = find({**step, "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[03-04]"})
        >>> found.machines, found.machine_rank, found.address, found.port
        (2, 1, 'gpu03', 20007)
    """
    if environ.get("RANK", "").strip() and environ.get("WORLD_SIZE", "").strip():
        return None
    hostname = hostname or socket.gethostname()
    try:
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
    except LaunchError:
        raise
    except ValueError as error:
        raise LaunchError(str(error)) from None
    detail = ", ".join(filter(None, [found.detail, _named(environ, "MASTER_ADDR", "MASTER_PORT")]))
    found = replace(found, port=found.port if port is None else port, detail=detail)
    return replace(found, address=host, no_address="") if host else found


def _srun(environ: Environ, task: Ranks) -> Cluster:
    """A launch, or a process, in a step of srun."""
    step = slurm.step(environ)
    one_each = step.size == step.nodes
    leads = (step.node if one_each else step.rank) == 0
    address, own, why = slurm.first_node(environ), environ.get("SLURMD_NODENAME"), ""
    if step.nodes == 1:
        address = _LOCAL
    elif not one_each and environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        address, why = None, "With srun --distribution=arbitrary no variable says which node has task 0."
    elif leads and address and own and own != address:
        address, why = None, _elsewhere(own, f"{slurm.node_list(environ)[1]} begins with {address}")
    names = ["SLURM_NODEID"] if one_each else ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_PROCID"]
    return Cluster(
        source="Slurm",
        machines=step.nodes,
        machine_rank=step.node,
        address=address,
        port=slurm.port(environ),
        task=None if one_each else task,
        detail=_named(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", *names),
        cpus_per_task=slurm.integer(environ, "SLURM_CPUS_PER_TASK"),
        no_address=why,
    )


def _slurm_alone(environ: Environ) -> Cluster | None:
    """A launch in a batch script, or in an interactive shell: it uses one node, perhaps of several."""
    tasks = slurm.integer(environ, "SLURM_STEP_NUM_TASKS") or 1
    nodes = slurm.integer(environ, "SLURM_JOB_NUM_NODES") or slurm.integer(environ, "SLURM_NNODES") or 1
    # Many steps of one task share an allocation, each with a run of its own.
    if nodes == 1 or (slurm.in_step(environ) and tasks == 1):
        return None
    return _alone(_SLURM, f"the allocation has {nodes} nodes", "SLURM_JOB_NUM_NODES")


def _by_host(environ: Environ, hostname: str) -> Cluster | None:
    """Number the launches on the hosts of a job of PBS or LSF."""
    job = _job(environ)
    if job is None or len(job.hosts) < 2:
        return None
    position = _position(job.hosts, hostname)
    if position is None or (position == 0 and job.scheduler.is_script(environ)):
        some = ", ".join([*job.hosts[:4], *(["..."] if len(job.hosts) > 4 else [])])
        what = f"the job has {len(job.hosts)} hosts ({some})"
        stranger = f", and {hostname} is none of them" if position is None else ""
        return _alone(job.scheduler, what + stranger, job.variable)
    name, port = job.scheduler.name, ranks.job_port(environ, (job.scheduler.number,))
    return Cluster(name, len(job.hosts), position, job.hosts[0], port, None, f"{job.variable}, host {hostname}")


def _alone(scheduler: _Scheduler, what: str, variable: str) -> Cluster:
    note = (
        f"{scheduler.name}: {what}, and this launch uses one machine; start it on each with {scheduler.start} to use all of "
        "them."
    )
    return Cluster(scheduler.name, 1, 0, None, None, None, variable, (note,))


def _mpi(environ: Environ, task: Ranks, hostname: str) -> Cluster:
    """A launch, or a process, that mpirun or jsrun has started."""
    size, here = task.world_size, task.local_world_size
    scheme = dict(ranks.SCHEMES)[task.source]
    names, port = (scheme[1], scheme[0 if here == 1 else 3]), ranks.mpi_port(environ)
    if here == size:
        return Cluster(task.source, 1, 0, _LOCAL, port, task, _named(environ, *names))
    job = _job(environ)
    hosts = job.hosts if job else []
    if task.source == "jsrun" and job and job.scheduler is _LSF:  # the node that jsrun itself runs on has one slot
        hosts = [host for host in hosts if job.slots[host] > 1] or hosts
    counted = slurm.integer(environ, "OMPI_MCA_orte_num_nodes") if task.source == "Open MPI" else None
    # Where nothing has counted the machines, the others are taken to be like this one.
    machines = counted or (-(-size // here) if here else 1)
    # Fewer hosts than launches: another machine has several.
    one_each = here == 1 and machines == size and not 0 < len(hosts) < size
    own, why = hostname, ""
    if job and hosts:
        address, variable, evidence = hosts[0], job.variable, f"{job.variable} begins with {hosts[0]}"
        own = environ.get("SLURMD_NODENAME", "") if job.scheduler is _SLURM else hostname
        away = _position(hosts, own) not in (0, None)
        machines = machines if one_each else min(machines, len(hosts))
    else:
        address, variable, away = _mpirun_host(environ, hostname)
        evidence = f"mpirun runs on {address}"
    if task.rank == 0 and away:
        address, why = None, _elsewhere(own, evidence)
    machine_rank, process = (task.rank, None) if one_each else (None, task)
    detail = _named(environ, *names, variable)
    return Cluster(task.source, machines, machine_rank, address, port, process, detail, no_address=why)


def _mpirun_host(environ: Environ, hostname: str) -> tuple[str | None, str, bool]:
    """Return the machine of Open MPI's mpirun, which takes rank 0 if it takes any; the variable, and whether this is another."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if match := re.search(r"tcp://([0-9.]+)[,:]|tcp6://\[([0-9A-Fa-f:.]+)[],]", uri):
        return match[1] or match[2], "OMPI_MCA_orte_hnp_uri", environ.get("OMPI_MCA_orte_local_daemon_uri", uri) != uri
    if match := re.fullmatch(r"prterun-(.+)-[0-9]+@[0-9]+", environ.get("PMIX_NAMESPACE", "")):
        return match[1], "PMIX_NAMESPACE", not _same_host(match[1], environ.get("PMIX_HOSTNAME") or hostname)
    return None, "", False


def _job(environ: Environ) -> _Job | None:
    """Read the list of hosts of the first scheduler that has one."""
    for scheduler in _SCHEDULERS:
        if not environ.get(scheduler.number, "").strip():
            continue
        for variable, parse in scheduler.lists.items():
            text = environ.get(variable, "").strip()
            if text and (slots := Counter(parse(text, variable))):
                return _Job(scheduler, variable, slots)
    return None


def _elsewhere(own: str, contrary: str) -> str:
    return f"This launch has number 0 and runs on {own}, but {contrary}."


def _named(environ: Environ, *names: str) -> str:
    return ", ".join(dict.fromkeys(name for name in names if environ.get(name, "").strip()))


def _position(hosts: list[str], own: str) -> int | None:
    return next((position for position, host in enumerate(hosts) if _same_host(host, own)), None)


def _same_host(one: str, other: str) -> bool:
    """Compare names, one of which may have the domain and the other not."""
    one, other = one.lower().rstrip("."), other.lower().rstrip(".")
    (short, domain), (other_short, other_domain) = (name.partition(".")[::2] for name in (one, other))
    return one == other or (short == other_short and not (domain and other_domain) and not short.isdecimal())
