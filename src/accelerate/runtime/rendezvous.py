"""How a process finds the others: from environment variables to ranks, from ranks to a process group.

Launchers say who is who in different words. They are read in this order; the first one that speaks of more than one
process is believed:

1. torchrun and compatible launchers: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE. Setting RANK=0 and WORLD_SIZE=1
   by hand keeps a process alone, whatever the others say.
2. Open MPI: OMPI_COMM_WORLD_*.
3. MPICH and Intel MPI: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS.
4. MVAPICH: MV2_COMM_WORLD_*.
5. Slurm, inside a step of `srun` with several tasks: SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID.
   The batch script itself has most of these too but no SLURM_STEP_ID, and is one process.
"""

import atexit
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accelerate import comm
from accelerate.runtime.forking import fork_when_quiet

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Ranks:
    """Where a process stands among the processes of a run.

    Args:
        rank: number among all processes.
        world_size: how many processes there are.
        local_rank: number among the processes of this machine.
        local_world_size: how many of them there are; None where nobody said.
        source: who said so: "torchrun", "Open MPI", "MPI", "MVAPICH", "Slurm", "process group" or "single".
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    source: str


ALONE = Ranks(0, 1, 0, 1, "single")

# name of the launcher, then its variables for rank, world size, local rank, local world size
_SCHEMES = (
    ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ("Open MPI", tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("MPI", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    ("MVAPICH", tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
)


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"The environment variable {name} is {text!r}; a launcher sets it to an integer. Correct or unset it."
        ) from None


def resolve(environ: Mapping[str, str] | None = None) -> Ranks | None:
    """Read ranks and sizes from the environment.

    Args:
        environ: the variables; None takes those of this process.

    Returns:
        None where no launcher speaks.

    Raises:
        ValueError: a variable is no integer, is missing, or contradicts another one.

    Example:
        >>> resolve({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
        Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2, source='torchrun')
    """
    environ = os.environ if environ is None else environ
    found = [(source, names, [_integer(environ, name) for name in names]) for source, names in _SCHEMES]
    (_, _, (rank, size, _, _)), others = found[0], found[1:]
    if rank is None and size is not None and size > 1:
        # mpirun does not set RANK, but its users often export WORLD_SIZE: then the two must agree.
        spoken = [entry for entry in others if entry[2][0] is not None]
        if not spoken:
            raise ValueError(
                f"WORLD_SIZE is {size} but RANK is not set. Start the script with `accelerate launch` or torchrun, or set "
                "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in every process."
            )
        source, names, numbers = spoken[0]
        if numbers[1] is not None and numbers[1] != size:
            raise ValueError(
                f"WORLD_SIZE is {size} but {names[1]} is {numbers[1]}. Unset WORLD_SIZE, or make them agree."
            )
        return _checked(source, names, numbers)
    if size is None and rank is not None and rank > 0:
        raise ValueError(
            f"RANK is {rank} but WORLD_SIZE is not set. Set it to the number of processes, or unset RANK."
        )
    if rank is not None and size is not None:
        return _checked(*found[0])
    for source, names, numbers in others:
        if numbers[0] is not None and numbers[1] is not None and numbers[1] > 1:
            return _checked(source, names, numbers)
    return _slurm(environ)


def _checked(source: str, names: tuple[str, ...], numbers: list[int | None]) -> Ranks:
    rank, size, local_rank, local_size = numbers
    if size is None or size < 1:
        raise ValueError(f"{names[1]} is {size}; it must be the number of processes, at least 1.")
    if not 0 <= rank < size:
        raise ValueError(f"{names[0]} is {rank} but {names[1]} is {size}: ranks go from 0 to {size - 1}.")
    if local_size is not None and not 1 <= local_size <= size:
        raise ValueError(
            f"{names[3]} is {local_size} but {names[1]} is {size}: a machine cannot run that many of them."
        )
    if local_rank is None or local_rank < 0:
        if local_size is not None and local_size > 1:
            if local_size != size:
                raise ValueError(
                    f"{names[2]} is not set although {names[3]} is {local_size}; set it in every process."
                )
            local_rank = rank
        else:
            local_rank = 0
    if local_rank >= (size if local_size is None else local_size):
        raise ValueError(
            f"{names[2]} is {local_rank} but {names[1] if local_size is None else names[3]} is "
            f"{size if local_size is None else local_size}: local ranks must be smaller."
        )
    return Ranks(rank, size, local_rank, local_size, source)


def _slurm(environ: Mapping[str, str]) -> Ranks | None:
    if not environ.get("SLURM_STEP_ID", "").isdigit():
        return None
    size = _integer(environ, "SLURM_STEP_NUM_TASKS") or _integer(environ, "SLURM_NTASKS")
    rank = _integer(environ, "SLURM_PROCID")
    if size is None or size < 2 or rank is None:
        return None
    # One entry per node, with repetitions: "4(x2),3" is three nodes with 4, 4 and 3 tasks.
    tasks: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        tasks += [int(count)] * int(repeat or 1)
    node = _integer(environ, "SLURM_NODEID") or 0
    local_size = tasks[node] if node < len(tasks) else None
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    return _checked("Slurm", names, [rank, size, _integer(environ, "SLURM_LOCALID"), local_size])


def _slurm_address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or ""
    # "gpu[03-05,09],login1" starts on gpu03.
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    if match is None:
        return None
    job = (_integer(environ, "SLURM_JOB_ID") or 0) + 977 * (_integer(environ, "SLURM_STEP_ID") or 0)
    return match[1] + (match[2] or ""), 20000 + job % 20000


def export(ranks: Ranks) -> None:
    """Write ranks and meeting point to torchrun's variables, which torch and other libraries read; set ones stay.

    Args:
        ranks: what `resolve` returned.

    Raises:
        ValueError: processes run on several machines and nobody said where they meet.
    """
    environ = os.environ
    numbers = (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size)
    for name, value in zip(_SCHEMES[0][1], numbers, strict=True):
        if value is not None:
            environ.setdefault(name, str(value))
    meeting = _slurm_address(environ) if ranks.source == "Slurm" else None
    if meeting is None and ranks.local_world_size in (None, ranks.world_size):
        meeting = "127.0.0.1", DEFAULT_PORT
    if "MASTER_ADDR" not in environ:
        if meeting is None:
            raise ValueError(
                f"{ranks.source} runs processes on several machines but MASTER_ADDR is not set. Set it in every process to "
                "the name or address of the machine with rank 0."
            )
        environ["MASTER_ADDR"] = meeting[0]
    environ.setdefault("MASTER_PORT", str(meeting[1] if meeting else DEFAULT_PORT))


def init_process_group(ranks: Ranks, backend: str, **settings: Any) -> None:
    """Join the other processes. Every rank must call it.

    Args:
        ranks: where this process stands.
        backend: a `torch.distributed` backend.
        settings: further arguments of `torch.distributed.init_process_group`: `timeout`, `init_method`, `store`, ...;
            None stands for torch's default.

    Source: https://pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    if ranks.source == "single":
        # A group of one needs no meeting point, so it cannot collide with another job's port either.
        settings.setdefault("store", dist.HashStore())
        settings.pop("init_method", None)
    elif "init_method" not in settings and "store" not in settings:
        export(ranks)
    if "store" not in settings:
        settings["store"] = _meet(ranks, settings.pop("init_method", "env://"), settings.get("timeout"))
    dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world_size, **settings)
    fork_when_quiet()
    global _leaves_at_exit
    if backend == "gloo" and not _leaves_at_exit:
        atexit.register(_leave)
        _leaves_at_exit = True


def _meet(ranks: Ranks, url: str, timeout: timedelta | None) -> Any:
    """Return a store that the ranks share and that holds nothing yet.

    The first group's store serves the following ones as well, each under a prefix of its own. A store per group would not
    do: torchrun's is the same one, with the old addresses in it, so a process that is early connects to a listener that is
    gone; and the one of rank 0 goes down with its group, possibly after another rank has connected to it again.
    """
    place = (url, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), ranks.rank, ranks.world_size)
    if place not in _meetings:
        limit = {} if timeout is None else {"timeout": timeout}
        store, _, _ = next(dist.rendezvous(url, ranks.rank, ranks.world_size, **limit))
        _meetings[place] = [store, 0]
    meeting = _meetings[place]
    meeting[1] += 1  # all ranks count alike
    return dist.PrefixStore(f"accelerate/group/{meeting[1]}", meeting[0])


_meetings: dict[tuple[Any, ...], list[Any]] = {}  # place to store, and how many groups have met there
_leaves_at_exit = False


# Long enough for a thread that waits for the interpreter lock to get it; a process ends this much later.
_SETTLING_S = 0.05


def _leave() -> None:
    """Leave a gloo group before the interpreter ends: its threads abort a process that ends beside them (torch 2.13).

    A thread of gloo drops its last references to tensors after the collective that used them has returned, and needs the
    interpreter lock for that. If the interpreter is ending by then, the process dies with "terminate called without an
    active exception" although the program was done. Torch offers nothing to wait for, not even `destroy_process_group`
    where a DDP reducer still holds the group, so the lock is let go of for a moment. Plain torch programs abort likewise.
    """
    time.sleep(_SETTLING_S)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        comm.forget()
        dist.destroy_process_group()


def live_ranks(environ: Mapping[str, str] | None = None) -> Ranks:
    """Return the ranks of the process group that is alive; the environment adds what the group does not know."""
    fork_when_quiet()
    environ = os.environ if environ is None else environ
    rank, size = dist.get_rank(), dist.get_world_size()
    told = resolve(environ) if environ.get("RANK") == str(rank) else None
    if told is not None and told.world_size == size:
        return Ranks(rank, size, told.local_rank, told.local_world_size, "process group")
    local_rank, local_size = _integer(environ, "LOCAL_RANK"), _integer(environ, "LOCAL_WORLD_SIZE")
    if local_rank is None or local_rank < 0:  # started without a launcher, as `torch.multiprocessing.spawn` does
        local_rank, local_size = rank, size
    return Ranks(rank, size, local_rank, local_size, "process group")


def live_timeout() -> timedelta | None:
    """Return how long collectives of the live process group may wait, or None if torch does not tell."""
    group = dist.distributed_c10d._get_default_group()
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        if options is not None and hasattr(options, "_timeout"):
            return options._timeout
    return None


def set_live_timeout(timeout: timedelta) -> bool:
    """Change how long collectives of the live process group may wait; say whether torch could."""
    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if change is None:
        return False
    change(timeout, dist.distributed_c10d._get_default_group())
    return live_timeout() in (timeout, None)


def check_devices_are_distinct(ranks: Ranks, device: torch.device, backend: str) -> None:
    """Fail on every rank if two processes would use one accelerator through a backend that forbids it.

    NCCL and its relatives hang or abort in the first collective then. Only called where a machine runs more processes
    than it shows devices to them; every rank of that machine must call it.

    Raises:
        ValueError: two processes share a device; the message names the way out.
    """
    properties = getattr(torch, device.type).get_device_properties(device)
    identity = str(getattr(properties, "uuid", None) or device)
    store = dist.distributed_c10d._get_default_store()
    keys = [f"accelerate/device/{socket.gethostname()}/{rank}" for rank in range(ranks.local_world_size or 1)]
    store.set(keys[ranks.local_rank], identity)
    identities = [store.get(key).decode() for key in keys]
    for rank, other in enumerate(identities):
        first = identities.index(other)
        if first != rank:
            dist.destroy_process_group()
            raise ValueError(
                f"The local processes {first} and {rank} would share one device ({other}), which backend={backend!r} does not "
                "allow. Start as many processes as there are devices, or pass "
                "InitProcessGroupKwargs(backend='gloo') (slower) to share them."
            )
