"""Processes that mpirun starts, on the machines of a host file.

Sources: https://docs.open-mpi.org/en/main/man-openmpi/man1/mpirun.1.html and
https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
"""

import re
import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from accelerate.extensions.machines import launchers
from accelerate.extensions.machines.addresses import is_this_machine
from accelerate.extensions.mpi.host_files import read_hosts
from accelerate.extensions.slurm import mpi as mpi  # by which the processes read their ranks
from accelerate.launch import hardware, runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import LaunchPlan, Resolved, Source
from accelerate.launch.runners import Process
from accelerate.runtime.ranks import DEFAULT_PORT

BY = "by mpirun"
_OPTION = "--mpirun_hostfile"
# The output of `mpirun --version`. MVAPICH's and Intel's are Hydra, as MPICH's is.
_ANSWERS = {"Open MPI": r"open[ -]mpi|openrte|prrte", "Hydra": r"mvapich|intel\(r\) mpi|hydra|mpich"}
# Settings of Intel's OpenMP for several processes on one machine; those of the user win.
_OPENMP = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}


def starts(values: Mapping[str, Resolved], on: set[str], job: Any) -> bool:
    """Say that mpirun starts the processes: a host file of it was given."""
    return True


def process(plan: LaunchPlan, environment: Mapping[str, str]) -> Process:
    """Return the call of mpirun that `run` makes. Only `mpirun --version` is started."""
    return _call(plan, environment)[1]


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Let mpirun run the processes; the launcher becomes it where its exit status can be believed."""
    flavour, call = _call(plan, environment)
    # Hydra, when it is stopped, ends with 0 as often as not: a scheduler would take the job for done.
    believed = flavour == "Open MPI"
    runners.start(call.command, call.environment, replace and believed, stopped_is_failed=not believed)


def _call(plan: LaunchPlan, environment: Mapping[str, str]) -> tuple[str, Process]:
    launchers.refuse_elastic(plan, "mpirun", starts_all=True)
    asked = plan.settings["num_machines"]
    hosts = read_hosts(plan["mpirun_hostfile"], _OPTION)
    shares = layout(hosts, plan.num_processes, asked.value if asked.source > Source.DEFAULT else None)
    variables = _variables(plan, environment, shares)
    # Only the names: other users could read values on a command line.
    names = launchers.handed_on(variables) if len(shares) > 1 else []
    counts, counted = {*shares.values()}, ",".join(f"{name}:{count}" for name, count in shares.items())
    flavour = flavour_of(variables)
    if any(":" in name for name in shares):  # an IPv6 address: `name:count` could not be told from it
        is_open_mpi, path = flavour == "Open MPI", str(plan["mpirun_hostfile"])
        listed = ["--hostfile", path] if is_open_mpi else ["-f", path]
        if len(counts) == 1:
            listed += ["--map-by", "ppr:{}:node".format(*counts)] if is_open_mpi else ["-ppn", str(*counts)]
    elif flavour == "Open MPI":
        listed = ["--host", counted]
    else:
        listed = ["-hosts", ",".join(shares), "-ppn", str(*counts)] if len(counts) == 1 else ["-hosts", counted]
    if flavour == "Open MPI":
        # More processes than cores of a socket are slow, not wrong.
        words = [*listed, "--bind-to", "socket:overload-allowed"]
        words += [word for name in names for word in ("-x", name)]
    else:
        words = [*listed, *(["-genvlist", ",".join(names)] if names else [])]
    return flavour, Process(
        "mpirun", ("mpirun", *words, "-n", str(plan.num_processes), *plan.python_command(unbuffered=True)), variables
    )


def flavour_of(environment: Mapping[str, str]) -> str:
    """Ask mpirun for its implementation: a key of `_ANSWERS`."""
    launchers.require_program(
        "mpirun", environment, f"Install Open MPI or MPICH on every machine, or remove {_OPTION}."
    )
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(["mpirun", "--version"], env=dict(environment), **streams, text=True, errors="replace")
    for flavour, answers in _ANSWERS.items():
        if re.search(answers, done.stdout, re.I):
            return flavour
    answer = done.stdout.strip()[:200]
    raise LaunchError(f"This mpirun is none of {', '.join(_ANSWERS)}: its --version prints {answer!r}.")


def _variables(plan: LaunchPlan, environment: Mapping[str, str], shares: Mapping[str, int]) -> dict[str, str]:
    variables = {**_OPENMP, **launchers.without_ranks(environment)}
    if plan["mpirun_ccl"] is not None:
        variables["CCL_WORKER_COUNT"] = str(plan["mpirun_ccl"])
    if len(shares) > 1 and plan.settings["num_cpu_threads_per_process"].source is Source.MACHINE:
        # The plan does not know the machines; they share the cores of one, taken to be like this one.
        variables["OMP_NUM_THREADS"] = str(max(1, hardware.usable_cores() // max(shares.values())))
    first = next(iter(shares)).rpartition("@")[2]
    if first == "localhost":  # which means nothing to other machines
        first = "127.0.0.1" if len(shares) == 1 else socket.gethostname()
    port = plan["main_process_port"] or DEFAULT_PORT
    if not plan["main_process_port"] and (first == socket.gethostname() or is_this_machine(first)):
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
    return {**variables, "MASTER_ADDR": str(plan["main_process_ip"] or first), "MASTER_PORT": str(port)}


def layout(hosts: Mapping[str, int | None], count: int, machines: int | None) -> dict[str, int]:
    """Return how many processes each machine that takes part gets: the same number everywhere if the slots allow it.

    Without a number of machines, slots are filled in the order of the hosts, or all hosts are taken where the file
    holds no slots. A LaunchError says that there are too few machines or slots.
    """
    if machines is not None and machines > len(hosts):
        raise LaunchError(f"--num_machines is {machines}, and {_OPTION} names {len(hosts)}. Add the others.")
    chosen = dict(list(hosts.items())[: min(len(hosts), count) if machines is None else machines])
    per_machine, rest = divmod(count, len(chosen))
    slotless = None in chosen.values()
    if not rest and (slotless or (machines is not None and min(chosen.values()) >= per_machine)):
        return dict.fromkeys(chosen, per_machine)
    asked, machines_text = f"--num_processes is {count}", f"{len(chosen)} machines"
    if slotless:
        raise LaunchError(f"{asked}, which does not divide evenly over the {machines_text} of {_OPTION}.")
    shares, remaining = {}, count
    for name, slots in chosen.items():
        shares[name] = min(slots, remaining)
        remaining -= shares[name]
    if remaining:
        raise LaunchError(f"{asked}, and {_OPTION} has {count - remaining} slots on {machines_text}.")
    return {name: share for name, share in shares.items() if share}
