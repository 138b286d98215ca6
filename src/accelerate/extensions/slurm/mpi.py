"""The variables that jsrun and MPI launchers set in a process, and a port that all processes of a run compute. It needs no torch."""

import contextlib
import os
import zlib
from collections.abc import Callable, Mapping

from accelerate.base.environment import integer_in
from accelerate.extensions.slurm import variables
from accelerate.runtime.ranks import Ranks, checked


def _after(prefix: str) -> tuple[str, ...]:
    return tuple(prefix + number for number in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))


# By the name of the launcher: its variables for rank, world size, local rank, local world size. The first one that names more than one
# process counts. "MPI" is MPICH and Intel MPI.
SCHEMES = {
    "jsrun": _after("JSM_NAMESPACE_"),
    "Open MPI": _after("OMPI_COMM_WORLD_"),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "MVAPICH": _after("MV2_COMM_WORLD_"),
}
# How Hydra, which MPICH and Intel MPI start processes with, gives its helper on each machine the address of mpirun.
_HYDRA_OPTIONS = (("--control-port",), ("--upstream-host", "--upstream-port"))


def ranks(environ: Mapping[str, str], task: Callable[[Mapping[str, str]], Ranks | None]) -> Ranks | None:
    """Return the ranks of this process; None if no MPI launcher has started several. `task` reads those of a step of Slurm."""
    entries = [(source, names, [integer_in(environ, name) for name in names]) for source, names in SCHEMES.items()]
    entries = [entry for entry in entries if entry[2][0] is not None]
    size = integer_in(environ, "WORLD_SIZE")
    if size is not None and size > 1 and entries:
        # mpirun does not set RANK, but its users often export WORLD_SIZE: then the two must be equal.
        _, names, numbers = entries[0]
        if numbers[1] not in (None, size):
            raise ValueError(f"WORLD_SIZE is {size} but {names[1]} is {numbers[1]}. Unset it, or make them equal.")
        return checked(*entries[0])
    for source, names, numbers in entries:
        if numbers[1] is not None and numbers[1] > 1:
            # `srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE as well, but only Slurm's own variables give the local rank.
            step = task(environ) if numbers[2] is None else None
            same = step is not None and [step.rank, step.world_size] == numbers[:2]
            return step if same else checked(source, names, numbers)
    return None


def port(environ: Mapping[str, str]) -> int | None:
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
    return variables.PORTS[zlib.crc32(name.encode("utf-8", "surrogateescape")) % len(variables.PORTS)]


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
