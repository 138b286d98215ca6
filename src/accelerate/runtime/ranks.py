"""The ranks of a process, as launchers say them in environment variables. It needs no torch, so the launcher can read it.

Launchers use different variables. They are read in this order; the first one that names more than one process counts:

1. torchrun and compatible launchers: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE. Setting RANK=0 and WORLD_SIZE=1
   manually makes a single process, whatever the others say.
2. jsrun: JSM_NAMESPACE_*.
3. Open MPI: OMPI_COMM_WORLD_*.
4. MPICH and Intel MPI: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS.
5. MVAPICH: MV2_COMM_WORLD_*.
6. A scheduler that an extension reads, such as Slurm.
"""

import contextlib
import importlib
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from accelerate.base.environment import PORTS, integer_in
from accelerate.extension import all_specs

# Torch's own, where none is chosen.
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Ranks:
    """The position of a process among the processes of a run.

    Args:
        local_world_size: how many processes this machine has; None if no launcher says.
        source: the launcher: "torchrun", "jsrun", "Open MPI", "MPI", "MVAPICH", a scheduler, "process group" or "single".
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    source: str

    @property
    def variables(self) -> dict[str, str]:
        """The numbers that are known, in torchrun's words."""
        numbers = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        named = zip(SCHEMES[0][1], numbers, strict=True)
        return {name: str(number) for name, number in named if number is not None}


ALONE = Ranks(0, 1, 0, 1, "single")


def _after(prefix: str) -> tuple[str, ...]:
    return tuple(prefix + number for number in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))


# name of the launcher, then its variables for rank, world size, local rank, local world size
SCHEMES = (
    ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ("jsrun", _after("JSM_NAMESPACE_")),
    ("Open MPI", _after("OMPI_COMM_WORLD_")),
    ("MPI", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    ("MVAPICH", _after("MV2_COMM_WORLD_")),
)
# Further variables that torch's elastic agent sets for each rank; a launch that has them was started by a rank.
_OF_AGENT = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
)
_OF_RANK = frozenset(
    (
        *SCHEMES[0][1],
        *("MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    )
)
_MPI = frozenset(dict(SCHEMES[1:]))
# How Hydra, which MPICH and Intel MPI start processes with, gives its helper on each machine the address of mpirun.
_HYDRA_OPTIONS = (("--control-port",), ("--upstream-host", "--upstream-port"))


def is_of_agent(environ: Mapping[str, str]) -> bool:
    """Return whether these are the variables of a rank of torch's elastic launcher."""
    return not environ.keys().isdisjoint(_OF_AGENT)


def without_agent(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of a rank of torch's elastic launcher."""
    return {
        name: value for name, value in environ.items() if name not in _OF_RANK and not name.startswith("TORCHELASTIC_")
    }


def resolve(environ: Mapping[str, str] | None = None) -> Ranks | None:
    """Read ranks and sizes from the environment; None where no launcher speaks, ValueError for a contradiction."""
    environ = os.environ if environ is None else environ
    entries = [(source, names, [integer_in(environ, name) for name in names]) for source, names in SCHEMES]
    rank, size = entries[0][2][:2]
    if rank is not None and size is not None:
        return checked(*entries[0])
    if rank is not None and rank > 0:
        raise ValueError(f"RANK is {rank} but WORLD_SIZE is not set. Set the number of processes, or unset RANK.")
    others = [entry for entry in entries[1:] if entry[2][0] is not None]
    if size is not None and size > 1:
        # mpirun does not set RANK, but its users often export WORLD_SIZE: then the two must be equal.
        if not others:
            raise ValueError(
                f"WORLD_SIZE is {size} but RANK is not set. Start the script with `accelerate launch` or torchrun, or set "
                "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in every process."
            )
        _, names, numbers = others[0]
        if numbers[1] not in (None, size):
            raise ValueError(f"WORLD_SIZE is {size} but {names[1]} is {numbers[1]}. Unset it, or make them equal.")
        return checked(*others[0])
    for source, names, numbers in others:
        if numbers[1] is not None and numbers[1] > 1:
            # `srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE as well, but only Slurm's own variables give the local rank.
            step = _of_scheduler(environ) if numbers[2] is None else None
            same = step is not None and [step.rank, step.world_size] == numbers[:2]
            return step if same else checked(source, names, numbers)
    return _of_scheduler(environ)


def checked(source: str, names: tuple[str, ...], numbers: list[int | None]) -> Ranks:
    """Return the ranks of the variables `names`, and fill in unset local ones; ValueError for a contradiction."""
    rank, size, local_rank, local_size = numbers
    if size is None or size < 1:
        raise ValueError(f"{names[1]} is {size}; it must be the number of processes, at least 1.")
    if not 0 <= rank < size:
        raise ValueError(f"{names[0]} is {rank} but {names[1]} is {size}: ranks go from 0 to {size - 1}.")
    if local_size is not None and not 1 <= local_size <= size:
        raise ValueError(f"{names[3]} is {local_size} but {names[1]} is {size}: a machine cannot run that many.")
    if local_rank is None or local_rank < 0:
        if local_size not in (None, 1, size):
            raise ValueError(f"{names[2]} is not set although {names[3]} is {local_size}; set it in every process.")
        local_rank = rank if local_size == size else 0
    local_limit, name = (size, names[1]) if local_size is None else (local_size, names[3])
    if local_rank >= local_limit:
        raise ValueError(f"{names[2]} is {local_rank} but {name} is {local_limit}: local ranks must be smaller.")
    return Ranks(rank, size, local_rank, local_size, source)


def schedulers(environ: Mapping[str, str]) -> list[ModuleType]:
    """Return the modules of extensions that read the variables of schedulers, if the variables are set.

    Such a module has its `NAME`, and these functions of the variables:

    - `ranks` returns the ranks of this process, or None.
    - `address` returns the host and the port at which the processes of the run meet, or None.
    - `find` returns the machines of the run for the launcher as a `launch.plan.Cluster`, or None.
    """
    names = [name for spec in all_specs() for variable, name in spec.schedulers.items() if variable in environ]
    return [importlib.import_module(name) for name in dict.fromkeys(names)]


def _of_scheduler(environ: Mapping[str, str]) -> Ranks | None:
    return next(filter(None, (scheduler.ranks(environ) for scheduler in schedulers(environ))), None)


def mpi_port(environ: Mapping[str, str]) -> int | None:
    """Return a port that all processes of an mpirun compute, and other runs most likely otherwise.

    It comes from what identifies this one mpirun, or else from the number of the job; None without either. Steps of
    Slurm do not count: only helpers of mpirun run in them.
    """
    run = environ.get("PMIX_NAMESPACE", "").strip() or (_hydra() if environ.get("PMI_RANK", "").strip() else None)
    return port_of(run) if run else job_port(environ)


def job_port(environ: Mapping[str, str]) -> int | None:
    """Return a port that all processes of a job compute; None outside of a job."""
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        if number := environ.get(name, "").strip():
            return port_of(number + (environ.get("LSB_JOBINDEX", "") if name == "LSB_JOBID" else ""))
    return None


def port_of(name: str) -> int:
    """Return the port of a run that has this name."""
    return PORTS[zlib.crc32(name.encode("utf-8", "surrogateescape")) % len(PORTS)]


def _hydra() -> str | None:
    """Return where the Hydra mpirun listens that started this process: its variables do not distinguish runs.

    Its helper, from which the processes of a machine descend, has it in its arguments.
    """
    import psutil  # slow, and only needed here

    with contextlib.suppress(psutil.Error, OSError):
        for ancestor in psutil.Process().parents():
            words = ancestor.cmdline()
            if words and os.path.basename(words[0]).startswith(("hydra_", "pmi_proxy")):
                for options in _HYDRA_OPTIONS:
                    if set(options) <= set(words[:-1]):
                        return ":".join(words[words.index(option) + 1] for option in options)
    return None


def export(ranks: Ranks) -> None:
    """Write ranks and the address of the rendezvous to torchrun's variables, which torch and other libraries read; set ones stay.

    ValueError if processes run on several machines and no variable says where they meet.
    """
    environ = os.environ
    for name, value in ranks.variables.items():
        environ.setdefault(name, value)
    address = next((module.address(environ) for module in schedulers(environ) if ranks.source == module.NAME), None)
    if address is None and ranks.local_world_size in (None, ranks.world_size):
        port = mpi_port(environ) if ranks.source in _MPI and not environ.get("MASTER_PORT") else None
        address = "127.0.0.1", port or DEFAULT_PORT
    if "MASTER_ADDR" not in environ:
        if address is None:
            raise ValueError(
                f"{ranks.source} runs processes on several machines but MASTER_ADDR is not set. Set it in every process to "
                "the name or address of the machine with rank 0."
            )
        environ["MASTER_ADDR"] = address[0]
    environ.setdefault("MASTER_PORT", str(address[1] if address else DEFAULT_PORT))
