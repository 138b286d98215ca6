"""What a scheduler or an MPI launcher says about the machines of a run, in the variables of this process.

Two shapes are told apart. Where it has started one launch on each machine, each launch is a machine and starts the processes of
it. Where it has started several on a machine, each launch is one process of the run: a task.

Asked in this order, the first one that speaks of several processes or machines answers:

1. torchrun's variables (RANK and WORLD_SIZE): then nobody else is asked; the worker reads them.
2. jsrun, Open MPI, MPICH and Intel MPI, MVAPICH. Before the schedulers, because they start their helpers through these and pass
   on the variables of the helper.
3. Slurm, in a step of `srun`.
4. PBS and LSF, by the list of their hosts and the name of this one.

MASTER_ADDR and MASTER_PORT, where they are set, say where the machines meet. Nothing here asks the network or imports torch.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from accelerate.launch.errors import LaunchError
from accelerate.runtime import ranks, slurm
from accelerate.runtime.ranks import Ranks

_LOCAL = "127.0.0.1"
# A list of hosts has a line for each core; the largest machines have some millions of them.
_MOST_BYTES = 1 << 26


@dataclass(frozen=True)
class Cluster:
    """What a scheduler says.

    Attributes:
        source: who says it: "Slurm", "Open MPI", "MPI", "MVAPICH", "PBS", "LSF" or "jsrun".
        machines: how many machines take part.
        machine_rank: which of them this is, from 0; None for a task where nobody says.
        address: name or address of machine 0, or of the process with rank 0; None where nobody says.
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


def find(environ: Mapping[str, str], hostname: str | None = None) -> Cluster | None:
    """Return what a scheduler says about the machines of a run.

    Args:
        environ: the variables.
        hostname: the name of this machine; None asks the system.

    Returns:
        None where nobody speaks of more than this one process. A single machine with notes where a job has more machines than
        this launch will use.

    Raises:
        LaunchError: a variable, or the file that it names, is malformed or contradicts another one.

    Example:
        >>> step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
        >>> found = find({**step, "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[03-04]"})
        >>> found.machines, found.machine_rank, found.address, found.port
        (2, 1, 'gpu03', 20007)
    """
    if environ.get("RANK", "").strip() and environ.get("WORLD_SIZE", "").strip():
        return None
    try:
        told = ranks.resolve({name: value for name, value in environ.items() if name not in ("RANK", "WORLD_SIZE")})
        if told is None:
            found = _allocation(environ, hostname or socket.gethostname())
        else:
            ranks.resolve(environ)  # a WORLD_SIZE by hand must agree
            found = _srun(environ, told) if told.source == "Slurm" else _mpi(environ, told, hostname)
        return found and _by_hand(environ, found)
    except LaunchError:
        raise
    except ValueError as error:
        raise LaunchError(str(error)) from None


def _by_hand(environ: Mapping[str, str], found: Cluster) -> Cluster:
    """Let MASTER_ADDR and MASTER_PORT say where the machines meet: many scripts of jobs set them."""
    host, port = environ.get("MASTER_ADDR", "").strip(), slurm.integer(environ, "MASTER_PORT")
    if found.machines == 1 and found.task is None:
        return found
    if port is not None and not 0 < port < 65536:
        raise LaunchError(f"MASTER_PORT is {port}; ports go from 1 to 65535. Correct or unset it.")
    names = _named(environ, "MASTER_ADDR", "MASTER_PORT")
    return replace(
        found,
        address=host or found.address,
        port=found.port if port is None else port,
        detail=", ".join(filter(None, (found.detail, names))),
        no_address="" if host else found.no_address,
    )


# Slurm


def _srun(environ: Mapping[str, str], told: Ranks) -> Cluster:
    step = slurm.step(environ)
    if not 0 <= step.node < step.nodes:
        raise LaunchError(
            f"SLURM_NODEID is {step.node} but SLURM_STEP_NUM_NODES is {step.nodes}: nodes are numbered from 0. Start the launch "
            "with srun, without changing its variables."
        )
    one_each = step.size == step.nodes
    address, why = (_LOCAL, "") if step.nodes == 1 else _slurm_address(environ, step, one_each)
    return Cluster(
        source="Slurm",
        machines=step.nodes,
        machine_rank=step.node,
        address=address,
        port=slurm.port(environ),
        task=None if one_each else told,
        detail=_named(
            environ,
            *("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
            *(("SLURM_NODEID",) if one_each else ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_PROCID")),
        ),
        cpus_per_task=slurm.integer(environ, "SLURM_CPUS_PER_TASK"),
        no_address=why,
    )


def _slurm_address(environ: Mapping[str, str], step: slurm.Step, one_each: bool) -> tuple[str | None, str]:
    """Return the node where the others find rank 0, or why nobody knows."""
    first, own = slurm.first_node(environ), environ.get("SLURMD_NODENAME")
    if not one_each and environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        return None, "With srun --distribution=arbitrary no variable says which node has task 0."
    leads = step.node == 0 if one_each else step.rank == 0
    if leads and first and own and own != first:
        return None, _elsewhere(own, f"{slurm.node_list(environ)[1]} begins with {first}")
    return first, ""


def _slurm_alone(environ: Mapping[str, str]) -> Cluster | None:
    """Say that a launch in a batch script, or in an interactive shell, uses one node of an allocation of several."""
    tasks = slurm.integer(environ, "SLURM_STEP_NUM_TASKS") or 1
    if slurm.in_step(environ) and tasks == 1:
        return None  # many such steps share an allocation, each with a run of its own
    nodes = _allocated_nodes(environ)
    if slurm.in_step(environ) and slurm.is_terminal(environ):
        what = f"this is the terminal of an srun with {tasks} tasks"
    elif nodes > 1:
        what = f"the allocation has {nodes} nodes"
    else:
        return None
    note = (
        f"Slurm: {what}, and this launch uses one machine; start it with `srun --ntasks-per-node=1 accelerate launch ...` to "
        "use all that was asked for."
    )
    return _alone("Slurm", _named(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_PTY_PORT"), note)


def _allocated_nodes(environ: Mapping[str, str]) -> int:
    components = [
        slurm.integer(environ, f"SLURM_JOB_NUM_NODES_HET_GROUP_{number}") or 0
        for number in range(min(slurm.integer(environ, "SLURM_HET_SIZE") or 0, len(environ)))
    ]
    whole = slurm.integer(environ, "SLURM_JOB_NUM_NODES") or slurm.integer(environ, "SLURM_NNODES") or 1
    return max(whole, sum(components))


# MPI launchers


def _mpi(environ: Mapping[str, str], told: Ranks, hostname: str | None) -> Cluster:
    size, here = told.world_size, told.local_world_size
    names = [_scheme(told.source)[1], _scheme(told.source)[0 if here == 1 else 3]]
    if here == size:
        return Cluster(told.source, 1, 0, _LOCAL, ranks.mpi_port(environ), told, _named(environ, *names))
    job = _job(environ, told.source)
    counted = slurm.integer(environ, "OMPI_MCA_orte_num_nodes") if told.source == "Open MPI" else None
    # Where nobody has counted the machines, the others are taken to be like this one.
    machines = counted or -(-size // here if here else -1)
    # Fewer hosts than launches: another machine has several.
    one_each = here == 1 and machines == size and not (job and len(job.hosts) < size)
    if job:
        address, by, why = _first_of(job, environ, told, hostname)
    else:
        address, by, why = _first_of_mpirun(environ, told, hostname)
    return Cluster(
        source=told.source,
        machines=machines if one_each or not job else min(machines, len(job.hosts)),
        machine_rank=told.rank if one_each else None,
        address=address,
        port=ranks.mpi_port(environ),
        task=None if one_each else told,
        detail=_named(environ, *names, *((by,) if address else ())),
        no_address=why,
    )


def _first_of(
    job: "_Job", environ: Mapping[str, str], told: Ranks, hostname: str | None
) -> tuple[str | None, str, str]:
    """Return the first host of a job, unless rank 0 turns out to run on another one; its variable, and why not."""
    first = job.hosts[0]
    own = environ.get("SLURMD_NODENAME") if job.source == "Slurm" else _own_name(hostname)
    if told.rank == 0 and own and _position(job.hosts, own) not in (0, None):
        return None, job.variable, _elsewhere(own, f"{job.variable} begins with {first}")
    return first, job.variable, ""


def _first_of_mpirun(environ: Mapping[str, str], told: Ranks, hostname: str | None) -> tuple[str | None, str, str]:
    """Return the machine of Open MPI's mpirun, which takes rank 0 if it takes any; the variable, and why not."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if match := re.search(r"tcp://([0-9.]+)[,:]|tcp6://\[([0-9A-Fa-f:.]+)[],]", uri):
        found, by = match[1] or match[2], "OMPI_MCA_orte_hnp_uri"
        away = environ.get("OMPI_MCA_orte_local_daemon_uri", uri) != uri
    elif match := re.fullmatch(r"prterun-(.+)-[0-9]+@[0-9]+", environ.get("PMIX_NAMESPACE", "")):
        found, by = match[1], "PMIX_NAMESPACE"
        away = not _same_host(found, environ.get("PMIX_HOSTNAME") or _own_name(hostname))
    else:
        return None, "", ""
    if told.rank == 0 and away:
        return None, by, _elsewhere(_own_name(hostname), f"mpirun runs on {found}")
    return found, by, ""


def _elsewhere(own: str, contrary: str) -> str:
    return f"This launch has number 0 and runs on {own}, but {contrary}."


def _scheme(source: str) -> tuple[str, ...]:
    return dict(ranks.SCHEMES)[source]


# The hosts of a job


@dataclass(frozen=True)
class _Job:
    """The hosts that a scheduler has given to a job.

    Attributes:
        source: the scheduler.
        hosts: their names, each once, in its order.
        slots: the hosts as the scheduler lists them: one entry for each process it reckons with.
        variable: who says so.
    """

    source: str
    hosts: tuple[str, ...]
    slots: tuple[str, ...]
    variable: str


def _job(environ: Mapping[str, str], launcher: str | None = None) -> _Job | None:
    for reader in (_slurm_job, _pbs_job, _lsf_job):
        job = reader(environ)
        if job is not None and job.hosts:
            if launcher == "jsrun" and job.source == "LSF":
                job = _without_launch_node(job)
            return job
    return None


def _slurm_job(environ: Mapping[str, str]) -> _Job | None:
    name = "SLURM_JOB_NODELIST" if environ.get("SLURM_JOB_NODELIST") else "SLURM_NODELIST"
    if not environ.get("SLURM_JOB_ID", "").strip() or not environ.get(name):
        return None
    hosts = tuple(slurm.some_hosts(environ[name], name))
    return _Job("Slurm", hosts, hosts, name)


def _pbs_job(environ: Mapping[str, str]) -> _Job | None:
    if not environ.get("PBS_JOBID", "").strip() or not environ.get("PBS_NODEFILE", "").strip():
        return None
    slots = _read_hosts(environ, "PBS_NODEFILE")
    if slots is None:
        if slurm.integer(environ, "PBS_NODENUM"):
            raise LaunchError(
                f"PBS_NODEFILE is {environ['PBS_NODEFILE']!r}, which cannot be read on this machine, and PBS_NODENUM is "
                f"{environ['PBS_NODENUM']}: the job has other machines. Copy the file to this one, or unset PBS_NODEFILE and give "
                "--num_machines, --machine_rank and --main_process_ip."
            )
        return None
    return _Job("PBS", tuple(dict.fromkeys(slots)), slots, "PBS_NODEFILE")


def _lsf_job(environ: Mapping[str, str]) -> _Job | None:
    if not environ.get("LSB_JOBID", "").strip():
        return None
    if environ.get("LSB_DJOB_HOSTFILE", "").strip():
        slots = _read_hosts(environ, "LSB_DJOB_HOSTFILE")
        if slots:
            return _Job("LSF", tuple(dict.fromkeys(slots)), slots, "LSB_DJOB_HOSTFILE")
    if pairs := environ.get("LSB_MCPU_HOSTS", "").split():
        counts = pairs[1::2]
        if len(pairs) % 2 or not all(count.isdecimal() and len(count) < 8 for count in counts):
            raise LaunchError(
                f"LSB_MCPU_HOSTS is {environ['LSB_MCPU_HOSTS'][:200]!r}; LSF writes a host and its number of slots in turn, such as "
                "'host1 4 host2 4'. Correct or unset it."
            )
        # Whether a host has one slot or more is all that anybody asks.
        slots = tuple(host for host, count in zip(pairs[::2], counts, strict=True) for _ in range(min(int(count), 2)))
        return _Job("LSF", tuple(dict.fromkeys(pairs[::2])), slots, "LSB_MCPU_HOSTS")
    slots = tuple(environ.get("LSB_HOSTS", "").split())
    return _Job("LSF", tuple(dict.fromkeys(slots)), slots, "LSB_HOSTS")


def _read_hosts(environ: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    """Read a file with a host in each line; None if it cannot be read here."""
    path = environ[name].strip()
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError):
        return None
    if len(data) > _MOST_BYTES:
        raise LaunchError(f"{name} is {path!r}, a file of more than {_MOST_BYTES} bytes, which is no list of hosts.")
    lines = (line.split() for line in data.decode("utf-8", "replace").splitlines())
    return tuple(words[0] for words in lines if words and not words[0].startswith("#"))


def _without_launch_node(job: _Job) -> _Job:
    """Leave out the node that jsrun itself runs on: LSF puts it first, with one slot, where it is none of those that compute."""
    first, rest = job.hosts[0], job.hosts[1:]
    if rest and job.slots.count(first) == 1 and all(job.slots.count(host) > 1 for host in rest[:64]):
        return _Job(job.source, rest, job.slots[1:], job.variable)
    return job


# Launches that no MPI launcher and no srun has started


def _allocation(environ: Mapping[str, str], hostname: str) -> Cluster | None:
    if environ.get("SLURM_JOB_ID", "").strip():
        return _slurm_alone(environ)
    job = _job(environ)
    return None if job is None or len(job.hosts) < 2 else _by_name(environ, job, hostname)


def _by_name(environ: Mapping[str, str], job: _Job, hostname: str) -> Cluster:
    """Tell a launch on each host of PBS or LSF from the job's script, which runs on the first one only."""
    if job.source == "PBS":
        started, number = _pbs_started(environ, job)
        how = "`pbsdsh -- accelerate launch ...` (Torque: `pbsdsh -u accelerate launch ...`)"
    else:
        started, number = _lsf_started(environ, job)
        how = '`blaunch -z "HOST1 HOST2 ..." accelerate launch ...`'
    position = _position(job.hosts, hostname)
    if position is None and number is not None:
        position = number
    if position is None:
        note = (
            f"{job.source}: the job has {len(job.hosts)} hosts ({_some(job.hosts)}), and {hostname} is none of them: this launch "
            "uses one machine. For several, give --num_machines, --machine_rank and --main_process_ip."
        )
        return _alone(job.source, job.variable, note)
    if position == 0 and not started:
        note = (
            f"{job.source}: the job has {len(job.hosts)} hosts, and this launch uses one of them; start it on each with {how} to "
            "use all of them."
        )
        return _alone(job.source, job.variable, note)
    return Cluster(
        source=job.source,
        machines=len(job.hosts),
        machine_rank=position,
        address=job.hosts[0],
        port=ranks.job_port(environ, ("PBS_JOBID" if job.source == "PBS" else "LSB_JOBID",)),
        task=None,
        detail=f"{job.variable}, host {hostname}",
    )


def _pbs_started(environ: Mapping[str, str], job: _Job) -> tuple[bool, int | None]:
    """Say whether pbsdsh has started this launch, or ssh on each host; and the number of the host, if PBS tells it."""
    task, node = (slurm.integer(environ, name) for name in ("PBS_TASKNUM", "PBS_NODENUM"))
    slot = slurm.integer(environ, "PBS_VNODENUM")
    if slot is not None and 0 <= slot < len(job.slots) and job.slots[slot] in job.slots[:slot]:
        raise LaunchError(
            f"PBS_VNODENUM is {slot}: pbsdsh has started several launches on {job.slots[slot]}. Start one on each host, with "
            "`pbsdsh -u`; each starts the processes of its host."
        )
    # The job's script is task 1 of its host. Through ssh come only the variables that somebody passes on by hand.
    started = task > 1 if task is not None else not environ.get("PBS_ENVIRONMENT")
    return started, node if node is not None and 0 < node < len(job.hosts) else None


def _lsf_started(environ: Mapping[str, str], job: _Job) -> tuple[bool, int | None]:
    """Say whether blaunch has started this launch."""
    task = slurm.integer(environ, "LSF_PM_TASKID")
    if task is not None and task > len(job.hosts):
        raise LaunchError(
            f"LSF_PM_TASKID is {task} and the job has {len(job.hosts)} hosts ({job.variable}): blaunch has started several "
            'launches on a host. Start one on each, with `blaunch -z "HOST1 HOST2 ..."`; each starts the processes of its host.'
        )
    return task is not None, None


# Small things


def _alone(source: str, detail: str, note: str) -> Cluster:
    return Cluster(source, 1, 0, None, None, None, detail, (note,))


def _named(environ: Mapping[str, str], *names: str) -> str:
    return ", ".join(dict.fromkeys(name for name in names if environ.get(name, "").strip()))


def _some(hosts: tuple[str, ...]) -> str:
    return ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")


def _own_name(hostname: str | None) -> str:
    return hostname or socket.gethostname()


def _position(hosts: tuple[str, ...], own: str) -> int | None:
    return next((position for position, host in enumerate(hosts) if _same_host(host, own)), None)


def _same_host(one: str, other: str) -> bool:
    """Compare names, one of which may have the domain and the other not."""
    one, other = one.lower().rstrip("."), other.lower().rstrip(".")
    if one == other:
        return True
    (short, domain), (other_short, other_domain) = (name.partition(".")[::2] for name in (one, other))
    return short == other_short and not (domain and other_domain) and not short.isdecimal()
