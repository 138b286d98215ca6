"""Processes that mpirun starts, and the host files that list their machines.

Sources: https://docs.open-mpi.org/en/main/man-openmpi/man1/mpirun.1.html and
https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
"""

import itertools
import os
import pathlib
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accelerate.launch import hardware
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import LaunchPlan, Source
from accelerate.launch.runners import Process, program
from accelerate.runtime.ranks import DEFAULT_PORT

_OPTION = "--mpirun_hostfile"
_INSTALL = "Install Open MPI, MPICH, Intel MPI or MVAPICH on every machine, or leave out --mpirun_hostfile."
# Settings of Intel's OpenMP for several processes on one machine; those of the user win.
_OPENMP = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
_ROOT_ALLOWED = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
# A name or an address. One that begins with a hyphen would be an option of ssh.
_NAME = re.compile(
    r"(?:[\w.-]+@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)"
)
_COLON = re.compile(r"((?:[\w.-]+@)?[A-Za-z0-9_][\w.-]*):([^:]*)")


@dataclass(frozen=True)
class _Flavour:
    """How an mpirun is called.

    Attributes:
        answers: what `mpirun --version` prints, one of these.
        file: the option for a host file.
        styles: the styles of host file that it reads.
        hosts: the option for machines in a list.
        counts: the list holds the processes of each machine even where all have the same number.
        each: the option for the processes of each machine.
        binding: further options.
    """

    answers: tuple[str, ...]
    file: str
    styles: tuple[str, ...]
    hosts: str
    counts: bool
    each: tuple[str, str]
    binding: tuple[str, ...] = ()


_OPEN_MPI = _Flavour(
    answers=("open mpi", "openrte", "open-mpi", "prrte"),
    file="--hostfile",
    styles=("slots",),
    hosts="--host",
    counts=True,
    each=("--map-by", "ppr:{}:node"),
    # More processes than cores of a socket are slow, not wrong.
    binding=("--bind-to", "socket:overload-allowed"),
)
# MVAPICH's and Intel's are Hydra, as MPICH's is.
_HYDRA = _Flavour(
    answers=("mvapich", "intel(r) mpi", "hydra", "mpich"),
    file="-f",
    styles=("plain", "colon"),
    hosts="-hosts",
    counts=False,
    each=("-ppn", "{}"),
)


@dataclass(frozen=True)
class Host:
    """A line of a host file.

    Attributes:
        name: the machine, with the user to log in as if one is named.
        slots: how many processes it takes; None where the file does not say.
    """

    name: str
    slots: int | None = None

    @property
    def address(self) -> str:
        """The machine without a user."""
        return self.name.rpartition("@")[2].strip("[]")


def processes(plan: LaunchPlan, environment: Mapping[str, str]) -> list[Process]:
    """Return the call of mpirun that `run` makes. mpirun is asked for its version; nothing else is started."""
    return [_call(plan, environment)[1]]


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Let mpirun run the processes; the launcher becomes it where its exit status can be believed."""
    flavour, process = _call(plan, environment)
    # Hydra, when it is stopped, ends with 0 as often as not: a scheduler would take the job for done.
    believed = flavour is _OPEN_MPI
    program.start(process.command, process.environment, replace and believed, stopped_is_failed=not believed)


def _call(plan: LaunchPlan, environment: Mapping[str, str]) -> tuple[_Flavour, Process]:
    program.refuse_elastic(plan, "mpirun")
    if plan["machine_rank"]:
        raise LaunchError(
            f"--machine_rank is {plan['machine_rank']}: mpirun starts the processes of all machines. Launch on one machine only, "
            "without the option."
        )
    path, asked = plan["mpirun_hostfile"], plan.settings["num_machines"]
    hosts, style = read_hosts(path, _OPTION)
    shares = layout(hosts, plan.num_processes, asked.value if asked.source > Source.DEFAULT else None)
    program.find("mpirun", environment, _INSTALL)
    variables = _variables(plan, environment, shares)
    flavour = _flavour(variables)
    words = _machines(flavour, path if len(shares) == len(hosts) and style in flavour.styles else None, shares)
    # The names alone: values on a command line could be read by others.
    names = program.handed_on(variables) if len(shares) > 1 else []
    if flavour is _OPEN_MPI:
        words += [word for name in names for word in ("-x", name)]
    elif names:
        words += ["-genvlist", ",".join(names)]
    command = plan.command
    if not plan["no_python"] and command[1] != "-u":
        command.insert(1, "-u")
    return flavour, Process("mpirun", ("mpirun", *words, *command), variables)


def _flavour(environment: Mapping[str, str]) -> _Flavour:
    """Ask mpirun what it is, and refuse one that would not run."""
    call = ["mpirun", "--version"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(call, env=dict(environment), **streams, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"mpirun --version does not answer: {error}. {_INSTALL}") from None
    said = done.stdout.lower()
    if any(words in said for words in _OPEN_MPI.answers):
        if hasattr(os, "geteuid") and os.geteuid() == 0 and any(environment.get(n) != "1" for n in _ROOT_ALLOWED):
            raise LaunchError(
                "Open MPI does not run as root unless that is allowed. In a container it is harmless: set "
                f"{_ROOT_ALLOWED[0]}=1 and {_ROOT_ALLOWED[1]}=1. Elsewhere, launch as another user."
            )
        return _OPEN_MPI
    if any(words in said for words in _HYDRA.answers):
        return _HYDRA
    raise LaunchError(
        "This mpirun is none that is known here: Open MPI, MPICH, Intel MPI or MVAPICH. Its --version prints "
        f"{done.stdout.strip()[:200]!r} (exit status {done.returncode})."
    )


def _machines(flavour: _Flavour, path: str | None, shares: Sequence[tuple[Host, int]]) -> list[str]:
    """Return the options for the machines and their processes; `path` is a host file that says the same, if there is one."""
    counts = {count for _, count in shares}
    even = len(counts) == 1
    counted = flavour.counts or not even
    words = [flavour.hosts, ",".join(f"{host.name}:{count}" if counted else host.name for host, count in shares)]
    if even and path is not None:
        words = [flavour.file, path]
    if even and len(shares) > 1:  # Open MPI 5 refuses it where a machine has fewer cores than processes
        words += [word.format(*counts) for word in flavour.each]
    return [*words, "-n", str(sum(count for _, count in shares)), *flavour.binding]


def _variables(plan: LaunchPlan, environment: Mapping[str, str], shares: Sequence[tuple[Host, int]]) -> dict[str, str]:
    variables = {**_OPENMP, **program.own(environment)}
    if plan["mpirun_ccl"] is not None:
        variables["CCL_WORKER_COUNT"] = str(plan["mpirun_ccl"])
    if len(shares) > 1 and plan.settings["num_cpu_threads_per_process"].source is Source.MACHINE:
        # The plan does not know the machines; they share the cores of one, taken to be like this one.
        variables["OMP_NUM_THREADS"] = str(max(1, hardware.usable_cores() // max(count for _, count in shares)))
    first = shares[0][0].address
    here = first in ("localhost", socket.gethostname()) or hardware.is_this_machine(first)
    address, port = plan["main_process_ip"] or first, plan["main_process_port"] or DEFAULT_PORT
    if here and not plan["main_process_ip"]:
        # Its name for itself means nothing to the others.
        address = "127.0.0.1" if len(shares) == 1 else socket.gethostname() if first == "localhost" else first
    if here and not plan["main_process_port"]:
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
    return {**variables, "MASTER_ADDR": str(address), "MASTER_PORT": str(port)}


def read_hosts(path: str, option: str, repeats: bool = True) -> tuple[list[Host], str]:
    """Read a host file of any style.

    Args:
        path: the file.
        option: the option that named it, for the errors.
        repeats: a machine may be listed again, which adds a slot; otherwise that is an error.

    Returns:
        The machines in the order of the file, each once, and its style: "slots" (`name slots=2`: Open MPI, DeepSpeed), "colon"
        (`name:2`: MPICH, Intel MPI, MVAPICH), "plain" (`name`: all of them), or "mixed", which no program reads.

    Raises:
        LaunchError: there is no such file, it names no machine, or a line is malformed. The message names the line.
    """
    if os.path.isdir(path):
        raise LaunchError(f"{option} is {path!r}: that is a folder; name the host file in it.")
    if not os.path.isfile(path):
        raise LaunchError(f"{option} is {path!r}: there is no such file (looked in {os.getcwd()}).")
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{option} is {path!r}, and it cannot be read: {error}") from None
    slots: dict[str, int | None] = {}
    styles = set()
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, count, style = _parse(words, f"line {number} of {path} ({option})")
        if name in slots:
            if not repeats:
                raise LaunchError(f"{name} stands twice in {path} ({option}). Give each machine one line.")
            style, count = "mixed", (slots[name] or 1) + (count or 1)
        slots[name] = count
        styles.add(style)
    if not slots:
        raise LaunchError(f"{path} ({option}) names no machine. Write one on each line, such as `node1 slots=4`.")
    return [Host(*item) for item in slots.items()], styles.pop() if len(styles) == 1 else "mixed"


def _parse(words: list[str], where: str) -> tuple[str, int | None, str]:
    """Return the machine, the slots and the style of a line."""
    name, count, style = words[0], None, "plain"
    if colon := _COLON.fullmatch(name):
        name, count, style = colon[1], _slots(colon[2], where), "colon"
    if not _NAME.fullmatch(name):
        raise LaunchError(f"{where} begins with {name[:100]!r}, which is no name or address of a machine.")
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            raise LaunchError(f"{where} holds {word[:100]!r}; behind the machine write slots=N or nothing.")
        if key == "slots":
            if style == "colon":
                raise LaunchError(f"{where} holds the slots twice. Write {name} slots={value[:20]}.")
            count, style = _slots(value, where), "slots"
    return name, count, style


def _slots(text: str, where: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,5}", text):
        raise LaunchError(f"{where} says {text[:50]!r} slots; that must be a number from 1.")
    return int(text)


def layout(hosts: Sequence[Host], count: int, machines: int | None) -> list[tuple[Host, int]]:
    """Return the machines that take part, in order, each with its processes: the same number everywhere if the slots allow it.

    Args:
        hosts: the machines of the host file.
        count: the processes of all machines together.
        machines: how many machines take part; None fills the slots in the order of the hosts, or takes all hosts where
            the file holds no slots.

    Raises:
        LaunchError: there are too few machines or too few slots.

    Example:
        >>> [(host.name, n) for host, n in layout([Host("a", 4), Host("b", 2)], 6, None)]
        [('a', 4), ('b', 2)]
    """
    if machines is not None and machines > len(hosts):
        raise LaunchError(
            f"--num_machines is {machines}, and {_OPTION} names {len(hosts)}. Add the others, or ask for fewer."
        )
    if any(host.slots is None for host in hosts):
        chosen = hosts[: min(len(hosts), count) if machines is None else machines]
        if count % len(chosen):
            raise LaunchError(
                f"--num_processes is {count}, which does not divide evenly over the {len(chosen)} machines of {_OPTION}. Change it, "
                "or write slots=N behind each machine."
            )
        return [(host, count // len(chosen)) for host in chosen]
    rooms = list(itertools.accumulate(host.slots for host in hosts))
    if machines is None:
        machines = next((number for number, room in enumerate(rooms, start=1) if room >= count), len(hosts))
    chosen = hosts[:machines]
    if rooms[machines - 1] < count:
        raise LaunchError(
            f"--num_processes is {count}, and {_OPTION} has {rooms[machines - 1]} slots on {machines} machines. Ask for fewer "
            "processes, or add slots."
        )
    each, rest = divmod(count, machines)
    if not rest and all(host.slots >= each for host in chosen):
        return [(host, each) for host in chosen]
    before = [0, *rooms]
    shares = [(host, min(host.slots, count - before[number])) for number, host in enumerate(chosen)]
    return [(host, share) for host, share in shares if share > 0]
