"""The ranks of a process, as launchers say them in environment variables. It needs no torch, so the launcher can read it.

Torchrun and compatible launchers set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Setting RANK=0 and WORLD_SIZE=1 manually makes
a single process, whatever the others say. Variables of other launchers are read by extensions, see `schedulers`.
"""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from accelerate.base.environment import integer_in
from accelerate.extension import all_specs

# Torch's own, where none is chosen.
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Ranks:
    """The position of a process among the processes of a run.

    Args:
        local_world_size: how many processes this machine has; None if no launcher says.
        source: the launcher: "torchrun", "process group", "single", or the name that a module of `schedulers` gives.
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
        named = zip(VARIABLES, numbers, strict=True)
        return {name: str(number) for name, number in named if number is not None}


ALONE = Ranks(0, 1, 0, 1, "single")
# The variables in which torchrun, and launchers that are compatible with it, say rank, world size, local rank and local world size.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Further variables that torch's elastic agent sets for each rank; a launch that has them was started by a rank.
_OF_AGENT = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
)
_OF_RANK = frozenset(
    (
        *VARIABLES,
        *("MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    )
)


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
    numbers = [integer_in(environ, name) for name in VARIABLES]
    rank, size = numbers[:2]
    if rank is not None and size is not None:
        return checked("torchrun", VARIABLES, numbers)
    if rank is not None and rank > 0:
        raise ValueError(f"RANK is {rank} but WORLD_SIZE is not set. Set the number of processes, or unset RANK.")
    found = next(filter(None, (scheduler.ranks(environ) for scheduler in schedulers(environ))), None)
    if found is None and size is not None and size > 1:
        raise ValueError(
            f"WORLD_SIZE is {size} but RANK is not set. Start the script with `accelerate launch` or torchrun, or set "
            "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in every process."
        )
    return found


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

    Such a module has these functions of the variables:

    - `ranks` returns the ranks of this process, or None.
    - `address` takes the ranks of this process, too. It returns the host and the port at which the processes meet, or None.
    - `arrange` takes the settings of a launch, too. It returns None, or three values: a job or None, settings that it changes,
      and notes. A job has `source` and `starts_each_process`. The launcher calls it with the settings and with the name of the other program that starts the processes,
      or None. It returns the variables of the one process that the launch starts, or None; settings that it changes; and notes.
    """
    names = [name for spec in all_specs() for variable, name in spec.schedulers.items() if variable in environ]
    return [importlib.import_module(name) for name in dict.fromkeys(names)]


def export(ranks: Ranks) -> None:
    """Write ranks and the address of the rendezvous to torchrun's variables, which torch and other libraries read; set ones stay.

    ValueError if processes run on several machines and no variable says where they meet.
    """
    environ = os.environ
    for name, value in ranks.variables.items():
        environ.setdefault(name, value)
    address = next(filter(None, (module.address(environ, ranks) for module in schedulers(environ))), None)
    if address is None and ranks.local_world_size in (None, ranks.world_size):
        address = "127.0.0.1", DEFAULT_PORT
    if "MASTER_ADDR" not in environ:
        if address is None:
            raise ValueError(
                f"{ranks.source} runs processes on several machines but MASTER_ADDR is not set. Set it in every process to "
                "the name or address of the machine with rank 0."
            )
        environ["MASTER_ADDR"] = address[0]
    environ.setdefault("MASTER_PORT", str(address[1] if address else DEFAULT_PORT))
