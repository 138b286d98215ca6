"""What a scheduler or an MPI launcher says about the machines of a run, in the variables of this process.

Two shapes are told apart. Where it has started one launch on each machine, each launch is a machine and starts the processes of
it. Where it has started several on a machine, each launch is one process of the run: a task.

Asked in this order, the first one that speaks of several processes or machines answers:

1. torchrun's variables (RANK and WORLD_SIZE): then nothing else is asked; the worker reads them.
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
# Where none of these is set, no launcher and no scheduler has anything to say.
_SPEAKERS = (*[names[0] for _, names in ranks.SCHEMES[1:]], "SLURM_STEP_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


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


@dataclass(frozen=True)
class _Job:
    """The hosts that a scheduler has given to a job.

    Attributes:
        source: the scheduler.
        slots: the hosts as the scheduler lists them: one entry for each process it reckons with.
        variable: what holds them.
    """

    source: str
    slots: tuple[str, ...]
    variable: str

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts, each once, in the scheduler's order."""
        return tuple(dict.fromkeys(self.slots))


def find(environ: Mapping[str, str], hostname: str | None = None) -> Cluster | None:
    """Return what a scheduler says about the machines of a run.

    Args:
        environ: the variables.
        hostname: the name of this machine; None asks the system.

    Returns:
        None where nothing speaks of more than this one process. A single machine with notes where a job has more machines than
        this launch will use.

    Raises:
        LaunchError: a variable, or the file that it names, is malformed or contradicts another one.

    Example:
        >>> step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
        >>> found = find({**step, "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[03-04]"})
        >>> found.machines, found.machine_rank, found.address, found.port
        (2, 1, 'gpu03', 20007)
    """
    by_torchrun = environ.get("RANK", "").strip() and environ.get("WORLD_SIZE", "").strip()
    if by_torchrun or not any(name in environ for name in _SPEAKERS):
        return None
    hostname = hostname or socket.gethostname()
    try:
        task = ranks.resolve({name: value for name, value in environ.items() if name not in ("RANK", "WORLD_SIZE")})
        if task is None:
            found = _slurm_alone(environ) if environ.get("SLURM_JOB_ID", "").strip() else _by_host(environ, hostname)
        else:
            ranks.resolve(environ)  # a WORLD_SIZE by hand must agree
            found = _srun(environ, task) if task.source == "Slurm" else _mpi(environ, task, hostname)
        return found and _with_address_by_hand(environ, found)
    except LaunchError:
        raise
    except ValueError as error:
        raise LaunchError(str(error)) from None


def _with_address_by_hand(environ: Mapping[str, str], found: Cluster) -> Cluster:
    """Let MASTER_ADDR and MASTER_PORT say where the machines meet: many scripts of jobs set them."""
    host, port = environ.get("MASTER_ADDR", "").strip(), slurm.integer(environ, "MASTER_PORT")
    if found.machines == 1 and found.task is None:
        return found
    if port is not None and not 0 < port < 65536:
        raise LaunchError(f"MASTER_PORT is {port}; ports go from 1 to 65535. Correct or unset it.")
    detail = ", ".join(filter(None, [found.detail, _named(environ, "MASTER_ADDR", "MASTER_PORT")]))
    found = replace(found, port=found.port if port is None else port, detail=detail)
    return replace(found, address=host, no_address="") if host else found


# Slurm


def _srun(environ: Mapping[str, str], task: Ranks) -> Cluster:
    """A launch, or a process, in a step of srun."""
    step = slurm.step(environ)
    if not 0 <= step.node < step.nodes:
        raise LaunchError(
            f"SLURM_NODEID is {step.node} but SLURM_STEP_NUM_NODES is {step.nodes}: nodes are numbered from 0. Start the launch "
            "with srun, without changing its variables."
        )
    one_each = step.size == step.nodes
    address, why = slurm.first_node(environ), ""
    own, leads = environ.get("SLURMD_NODENAME"), (step.node if one_each else step.rank) == 0
    if step.nodes == 1:
        address = _LOCAL
    elif not one_each and environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        address, why = None, "With srun --distribution=arbitrary no variable says which node has task 0."
    elif leads and address and own and own != address:
        address, why = None, _elsewhere(own, f"{slurm.node_list(environ)[1]} begins with {address}")
    names = ["SLURM_NODEID"] if one_each else ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_PROCID"]
    detail = _named(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", *names)
    port, cpus = slurm.port(environ), slurm.integer(environ, "SLURM_CPUS_PER_TASK")
    process = None if one_each else task
    return Cluster("Slurm", step.nodes, step.node, address, port, process, detail, cpus_per_task=cpus, no_address=why)


def _slurm_alone(environ: Mapping[str, str]) -> Cluster | None:
    """A launch in a batch script, or in an interactive shell: it uses one node, perhaps of several."""
    tasks = slurm.integer(environ, "SLURM_STEP_NUM_TASKS") or 1
    if slurm.in_step(environ) and tasks == 1:
        return None  # many such steps share an allocation, each with a run of its own
    components = range(min(slurm.integer(environ, "SLURM_HET_SIZE") or 0, len(environ)))
    sizes = [slurm.integer(environ, f"SLURM_JOB_NUM_NODES_HET_GROUP_{number}") or 0 for number in components]
    whole = slurm.integer(environ, "SLURM_JOB_NUM_NODES") or slurm.integer(environ, "SLURM_NNODES") or 1
    nodes = max(whole, sum(sizes))
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


# MPI launchers


def _mpi(environ: Mapping[str, str], task: Ranks, hostname: str) -> Cluster:
    """A launch, or a process, that mpirun or jsrun has started."""
    size, here, port = task.world_size, task.local_world_size, ranks.mpi_port(environ)
    scheme = dict(ranks.SCHEMES)[task.source]
    names = [scheme[1], scheme[0 if here == 1 else 3]]
    if here == size:
        return Cluster(task.source, 1, 0, _LOCAL, port, task, _named(environ, *names))
    job = _job(environ)
    hosts = _without_launch_node(job) if job and (task.source, job.source) == ("jsrun", "LSF") else job and job.hosts
    counted = slurm.integer(environ, "OMPI_MCA_orte_num_nodes") if task.source == "Open MPI" else None
    # Where nothing has counted the machines, the others are taken to be like this one.
    machines = counted or -(-size // here if here else -1)
    # Fewer hosts than launches: another machine has several.
    one_each = here == 1 and machines == size and not (hosts and len(hosts) < size)
    if hosts:
        address, by, evidence = hosts[0], job.variable, f"{job.variable} begins with {hosts[0]}"
        own = environ.get("SLURMD_NODENAME") if job.source == "Slurm" else hostname
        away = bool(own) and _position(hosts, own) not in (0, None)
        machines = machines if one_each else min(machines, len(hosts))
    else:
        address, by, away = _mpirun_host(environ, hostname)
        own, evidence = hostname, f"mpirun runs on {address}"
    machine_rank, process = (task.rank, None) if one_each else (None, task)
    if task.rank == 0 and away:
        why = _elsewhere(own, evidence)
        return Cluster(
            task.source, machines, machine_rank, None, port, process, _named(environ, *names), no_address=why
        )
    return Cluster(task.source, machines, machine_rank, address, port, process, _named(environ, *names, by))


def _mpirun_host(environ: Mapping[str, str], hostname: str) -> tuple[str | None, str, bool]:
    """Return the machine of Open MPI's mpirun, which takes rank 0 if it takes any; the variable, and whether this is another."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if match := re.search(r"tcp://([0-9.]+)[,:]|tcp6://\[([0-9A-Fa-f:.]+)[],]", uri):
        return match[1] or match[2], "OMPI_MCA_orte_hnp_uri", environ.get("OMPI_MCA_orte_local_daemon_uri", uri) != uri
    if match := re.fullmatch(r"prterun-(.+)-[0-9]+@[0-9]+", environ.get("PMIX_NAMESPACE", "")):
        return match[1], "PMIX_NAMESPACE", not _same_host(match[1], environ.get("PMIX_HOSTNAME") or hostname)
    return None, "", False


def _without_launch_node(job: _Job) -> tuple[str, ...]:
    """Leave out the node that jsrun itself runs on: LSF puts it first, with one slot, where it is none of those that compute."""
    first, rest = job.hosts[0], job.hosts[1:]
    leads = rest and job.slots.count(first) == 1 and all(job.slots.count(host) > 1 for host in rest[:64])
    return rest if leads else job.hosts


# The hosts of a job


def _job(environ: Mapping[str, str]) -> _Job | None:
    readers = {"SLURM_JOB_ID": _slurm_job, "PBS_JOBID": _pbs_job, "LSB_JOBID": _lsf_job}
    jobs = [read(environ) for number, read in readers.items() if environ.get(number, "").strip()]
    return next((job for job in jobs if job.slots), None)


def _slurm_job(environ: Mapping[str, str]) -> _Job:
    name = "SLURM_JOB_NODELIST" if environ.get("SLURM_JOB_NODELIST") else "SLURM_NODELIST"
    return _Job("Slurm", tuple(slurm.some_hosts(environ[name], name)) if environ.get(name) else (), name)


def _pbs_job(environ: Mapping[str, str]) -> _Job:
    slots = _read_hosts(environ, "PBS_NODEFILE")
    if slots is None and slurm.integer(environ, "PBS_NODENUM"):
        raise LaunchError(
            f"PBS_NODEFILE is {environ['PBS_NODEFILE']!r}, which cannot be read on this machine, and PBS_NODENUM is "
            f"{environ['PBS_NODENUM']}: the job has other machines. Copy the file to this one, or unset PBS_NODEFILE and give "
            "--num_machines, --machine_rank and --main_process_ip."
        )
    return _Job("PBS", slots or (), "PBS_NODEFILE")


def _lsf_job(environ: Mapping[str, str]) -> _Job:
    if slots := _read_hosts(environ, "LSB_DJOB_HOSTFILE"):
        return _Job("LSF", slots, "LSB_DJOB_HOSTFILE")
    pairs = environ.get("LSB_MCPU_HOSTS", "").split()
    if not pairs:
        return _Job("LSF", tuple(environ.get("LSB_HOSTS", "").split()), "LSB_HOSTS")
    counts = pairs[1::2]
    if len(pairs) % 2 or not all(count.isdecimal() and len(count) < 8 for count in counts):
        raise LaunchError(
            f"LSB_MCPU_HOSTS is {environ['LSB_MCPU_HOSTS'][:200]!r}; LSF writes a host and its number of slots in turn, such as "
            "'host1 4 host2 4'. Correct or unset it."
        )
    # Whether a host has one slot or more is all that matters here.
    listed: list[str] = []
    for host, count in zip(pairs[::2], counts, strict=True):
        listed += [host] * min(int(count), 2)
    return _Job("LSF", tuple(listed), "LSB_MCPU_HOSTS")


def _read_hosts(environ: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    """Read the file that a variable names, with a host in each line; () without one, None if it cannot be read here."""
    path = environ.get(name, "").strip()
    if not path:
        return ()
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError):
        return None
    if len(data) > _MOST_BYTES:
        raise LaunchError(f"{name} is {path!r}, a file of more than {_MOST_BYTES} bytes, which is no list of hosts.")
    lines = [line.split() for line in data.decode("utf-8", "replace").splitlines()]
    return tuple(words[0] for words in lines if words and not words[0].startswith("#"))


# Launches on the hosts of PBS and LSF


def _by_host(environ: Mapping[str, str], hostname: str) -> Cluster | None:
    """Tell a launch on each host of a job from the job's script, which runs on the first one only."""
    job = _job(environ)
    if job is None or len(job.hosts) < 2:
        return None
    if job.source == "PBS":
        number, is_script = "PBS_JOBID", _is_pbs_script(environ, job)
        how = "`pbsdsh -- accelerate launch ...` (Torque: `pbsdsh -u accelerate launch ...`)"
    else:
        number, is_script = "LSB_JOBID", _is_lsf_script(environ, job)
        how = '`blaunch -z "HOST1 HOST2 ..." accelerate launch ...`'
    position, node = _position(job.hosts, hostname), slurm.integer(environ, "PBS_NODENUM")
    if position is None and job.source == "PBS" and node is not None and 0 < node < len(job.hosts):
        position = node
    has = f"{job.source}: the job has {len(job.hosts)} hosts"
    if position is None:
        some = ", ".join([*job.hosts[:4], *(["..."] if len(job.hosts) > 4 else [])])
        note = (
            f"{has} ({some}), and {hostname} is none of them: this launch uses one machine. For several, give --num_machines, "
            "--machine_rank and --main_process_ip."
        )
        return _alone(job.source, job.variable, note)
    if position == 0 and is_script:
        note = f"{has}, and this launch uses one of them; start it on each with {how} to use all of them."
        return _alone(job.source, job.variable, note)
    port, detail = ranks.job_port(environ, (number,)), f"{job.variable}, host {hostname}"
    return Cluster(job.source, len(job.hosts), position, job.hosts[0], port, None, detail)


def _is_pbs_script(environ: Mapping[str, str], job: _Job) -> bool:
    """Say whether this launch runs in the job's script; otherwise pbsdsh has started it, or ssh."""
    task, slot = slurm.integer(environ, "PBS_TASKNUM"), slurm.integer(environ, "PBS_VNODENUM")
    if slot is not None and 0 <= slot < len(job.slots) and job.slots[slot] in job.slots[:slot]:
        raise LaunchError(
            f"PBS_VNODENUM is {slot}: pbsdsh has started several launches on {job.slots[slot]}. Start one on each host, with "
            "`pbsdsh -u`; each starts the processes of its host."
        )
    # The job's script is task 1 of its host. ssh passes on no variables but those that its user names.
    return bool(environ.get("PBS_ENVIRONMENT")) if task is None else task <= 1


def _is_lsf_script(environ: Mapping[str, str], job: _Job) -> bool:
    """Say whether this launch runs in the job's script; otherwise blaunch has started it."""
    task = slurm.integer(environ, "LSF_PM_TASKID")
    if task is not None and task > len(job.hosts):
        raise LaunchError(
            f"LSF_PM_TASKID is {task} and the job has {len(job.hosts)} hosts ({job.variable}): blaunch has started several "
            'launches on a host. Start one on each, with `blaunch -z "HOST1 HOST2 ..."`; each starts the processes of its host.'
        )
    return task is None


def _alone(source: str, detail: str, note: str) -> Cluster:
    return Cluster(source, 1, 0, None, None, None, detail, (note,))


def _elsewhere(own: str, contrary: str) -> str:
    return f"This launch has number 0 and runs on {own}, but {contrary}."


def _named(environ: Mapping[str, str], *names: str) -> str:
    return ", ".join(dict.fromkeys(name for name in names if environ.get(name, "").strip()))


def _position(hosts: tuple[str, ...], own: str) -> int | None:
    return next((position for position, host in enumerate(hosts) if _same_host(host, own)), None)


def _same_host(one: str, other: str) -> bool:
    """Compare names, one of which may have the domain and the other not."""
    one, other = one.lower().rstrip("."), other.lower().rstrip(".")
    if one == other:
        return True
    (short, domain), (other_short, other_domain) = (name.partition(".")[::2] for name in (one, other))
    return short == other_short and not (domain and other_domain) and not short.isdecimal()
