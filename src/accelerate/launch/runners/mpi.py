"""Processes that mpirun starts, on the machines of a host file.

Sources: https://docs.open-mpi.org/en/main/man-openmpi/man1/mpirun.1.html and
https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
"""

import socket
import subprocess
from collections.abc import Mapping, Sequence

from accelerate.launch import hardware
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import LaunchPlan, Source
from accelerate.launch.runners import hostfile, program, single
from accelerate.launch.runners.base import Process
from accelerate.launch.runners.hostfile import Host, Hostfile
from accelerate.runtime.ranks import DEFAULT_PORT

_OPTION = "--mpirun_hostfile"
_INSTALL = "Install Open MPI, MPICH, Intel MPI or MVAPICH on every machine, or leave out --mpirun_hostfile."
# What `mpirun --version` says -> who made it. MVAPICH's and Intel's are Hydra too, so they come first.
_MAKERS = (
    ("open mpi", "openmpi"),
    ("openrte", "openmpi"),
    ("open-mpi", "openmpi"),
    ("prrte", "openmpi"),
    ("mvapich", "mvapich"),
    ("intel(r) mpi", "intel"),
    ("hydra", "mpich"),
    ("mpich", "mpich"),
)
# Settings of Intel's OpenMP for several processes on one machine; those of the user win.
_OPENMP = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}


def processes(plan: LaunchPlan, environment: Mapping[str, str]) -> list[Process]:
    """Return the call of mpirun that `run` makes. mpirun is asked for its version; nothing else is started.

    Args:
        plan: what is started.
        environment: the variables that all processes share.

    Raises:
        LaunchError: mpirun is missing or unknown, it would refuse to run, or the host file is wrong.
    """
    return [_call(plan, environment)[1]]


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Let mpirun run the processes of a plan.

    Args:
        plan: what is started.
        environment: the variables that all processes share.
        replace: become mpirun, where the system can do that.

    Raises:
        LaunchError: as `processes`.
        subprocess.CalledProcessError: mpirun ended with the status of a process that failed.
    """
    maker, process = _call(plan, environment)
    if maker == "openmpi":
        program.start(process.command, process.environment, replace)
    else:
        # Hydra, told to stop, ends with 0 as often as not: a scheduler would take the job for done.
        single.run_child(list(process.command), process.environment, stopped_is_failed=True)


def ask_maker(path: str, environment: Mapping[str, str]) -> str:
    """Ask mpirun who made it: "openmpi", "mpich", "intel" or "mvapich".

    Args:
        path: the program.
        environment: its variables.

    Raises:
        LaunchError: it does not answer, or says something unknown.
    """
    try:
        done = subprocess.run(
            [path, "--version"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version does not answer: {error}. {_INSTALL}") from None
    said = done.stdout + done.stderr
    for words, maker in _MAKERS:
        if words in said.lower():
            return maker
    raise LaunchError(
        f"{path} is no mpirun that is known here: Open MPI, MPICH, Intel MPI or MVAPICH. Its --version says "
        f"{said.strip()[:200]!r} (exit status {done.returncode})."
    )


def _call(plan: LaunchPlan, environment: Mapping[str, str]) -> tuple[str, Process]:
    """Return who made mpirun, and its call."""
    program.refuse_elastic(plan, "mpirun")
    if plan["machine_rank"]:
        raise LaunchError(
            f"--machine_rank is {plan['machine_rank']}: mpirun starts the processes of all machines. Launch on one machine only, "
            "without the option."
        )
    file = hostfile.read(plan["mpirun_hostfile"], _OPTION)
    asked = plan.settings["num_machines"]
    machines = asked.value if asked.source > Source.DEFAULT else None
    places = hostfile.layout(file.hosts, plan.num_processes, machines, _OPTION)
    program.find("mpirun", environment, _INSTALL)
    variables = _variables(plan, environment, places)
    maker = ask_maker("mpirun", variables)
    names = program.handed_on(variables) if len(places) > 1 else []
    if maker == "openmpi":
        _check_root(variables)
        words = _open_mpi(file, places, names)
    else:
        words = _hydra(file, places, names)
    return maker, Process("mpirun", ("mpirun", *words, *_worker(plan)), variables)


def _open_mpi(file: Hostfile, places: Sequence[tuple[Host, int]], names: Sequence[str]) -> list[str]:
    counts = {count for _, count in places}
    words = ["--hostfile", file.path]
    if file.style != "slots" or len(places) < len(file.hosts) or len(counts) > 1:
        words = ["--host", ",".join(f"{host.name}:{count}" for host, count in places)]
    if len(counts) == 1:
        words += ["--map-by", f"ppr:{places[0][1]}:node"]
    # More processes than cores of a socket are slow, not wrong.
    words += ["-n", str(sum(count for _, count in places)), "--bind-to", "socket:overload-allowed"]
    for name in names:
        words += ["-x", name]  # the name alone: values on a command line could be read by others
    return words


def _hydra(file: Hostfile, places: Sequence[tuple[Host, int]], names: Sequence[str]) -> list[str]:
    counts = {count for _, count in places}
    words = ["-f", file.path]
    if len(counts) > 1:
        words = ["-hosts", ",".join(f"{host.name}:{count}" for host, count in places)]
    elif file.style not in ("plain", "colon") or len(places) < len(file.hosts):
        words = ["-hosts", ",".join(host.name for host, _ in places)]
    if len(counts) == 1:
        words += ["-ppn", str(places[0][1])]
    words += ["-n", str(sum(count for _, count in places))]
    return [*words, "-genvlist", ",".join(names)] if names else words


def _worker(plan: LaunchPlan) -> list[str]:
    command = plan.command
    if not plan["no_python"] and command[1] != "-u":
        command.insert(1, "-u")
    return command


def _variables(plan: LaunchPlan, environment: Mapping[str, str], places: Sequence[tuple[Host, int]]) -> dict[str, str]:
    variables = {**_OPENMP, **program.own(environment)}
    if plan["mpirun_ccl"] is not None:
        variables["CCL_WORKER_COUNT"] = str(plan["mpirun_ccl"])
    if len(places) > 1 and plan.settings["num_cpu_threads_per_process"].source is Source.MACHINE:
        # The plan does not know the machines; they share the cores of one, taken to be like this one.
        variables["OMP_NUM_THREADS"] = str(max(1, hardware.usable_cores() // max(count for _, count in places)))
    first = places[0][0].address
    here = hostfile.is_here(first)
    address = plan["main_process_ip"]
    if not address:
        address = first
        if here:
            # Its name for itself means nothing to the others.
            address = "127.0.0.1" if len(places) == 1 else socket.gethostname() if first == "localhost" else first
    port = plan["main_process_port"] or (_free_port() if here else DEFAULT_PORT)
    return {**variables, "MASTER_ADDR": str(address), "MASTER_PORT": str(port)}


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _check_root(environment: Mapping[str, str]) -> None:
    needed = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if program.is_root() and not all(environment.get(name) == "1" for name in needed):
        raise LaunchError(
            f"Open MPI does not run as root unless that is allowed. In a container it is harmless: set {needed[0]}=1 and "
            f"{needed[1]}=1. Elsewhere, launch as another user."
        )
