"""The variables that Slurm sets in a task: lists of nodes, counts, steps. It needs no torch.

They are documented at https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES. Undocumented ones were seen
with Slurm 22.05 and are marked in the code.
"""

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from accelerate.base.environment import integer_in
from accelerate.runtime.ranks import Ranks

# Linux hands out ports from 32768 on to a program that asks for any port; a port below is not taken by chance.
PORTS = range(20000, 32768)
# Steps with these numbers and above are no `srun` of a user: the interactive shell of salloc, the batch script, ...
_SPECIAL_STEPS = 0xFFFFFF00
# A name with lists of numbers in it.
_ENTRY = r"(?:[^\[\],\s]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+"


@dataclass(frozen=True)
class Step:
    """A task of an `srun` step of at least two; `local_rank` and `local_size` are None where Slurm does not say."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node: int
    nodes: int


@dataclass(frozen=True)
class Cluster:
    """What a scheduler says; `source` is its name, for people.

    Attributes:
        machine_rank: which machine this is, from 0; None for a task where no variable says.
        address: of machine 0, or of the process with rank 0; None where no variable says.
        port: a port that all of them compute from the number of the job; None without such a number.
        task: which process this is, where each process has been started separately: the launcher starts that one only.
        notes: lines for the user.
    """

    source: str
    machines: int
    machine_rank: int | None
    address: str | None
    port: int | None
    task: Ranks | None
    notes: tuple[str, ...] = ()


def hosts(text: str, name: str = "SLURM_NODELIST") -> list[str]:
    """Return the nodes of a list such as "gpu[03-05,09],login1"; ValueError names the variable of a malformed one."""
    if re.fullmatch(rf"\s*{_ENTRY}\s*(,\s*{_ENTRY}\s*)*", text) is None:
        raise ValueError(
            f"The environment variable {name} is {text!r}, which is no list of nodes: names are parted by commas, and have lists "
            "such as [1-3,7]. Correct or unset it."
        )
    names: list[str] = []
    for entry in re.findall(_ENTRY, text):
        # A part of a name, the list after it, the next part, ...: the last list runs fastest.
        parts = re.split(r"\[(.*?)\]", entry)
        choices = [_numbers(part) if place % 2 else [part] for place, part in enumerate(parts)]
        names += map("".join, itertools.product(*choices))
    return names


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def tasks_on(text: str, node: int, name: str = "SLURM_STEP_TASKS_PER_NODE") -> int | None:
    """Return how many tasks a node has; "4(x2),3" is three nodes with 4, 4 and 3. None if the text has fewer nodes."""
    if not text:
        return None
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:\(x([0-9]+)\))?\s*", part)
        if match is None:
            raise ValueError(
                f"The environment variable {name} is {text!r}; Slurm writes numbers of tasks, such as 4(x2),3. "
                "Correct or unset it."
            )
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return None


def step(environ: Mapping[str, str]) -> Step | None:
    """Return this process's task in a step of several tasks.

    None outside of a step, in a step of one task, and if the variables are those of another step: a batch script submitted
    from within a step inherits that step's. Also None for commands typed into the shell of `srun --pty`: Slurm starts the
    shell in all tasks, but it ends at once if there is no terminal.
    """
    if not in_step(environ):
        return None
    size = integer_in(environ, "SLURM_STEP_NUM_TASKS") or integer_in(environ, "SLURM_NTASKS")
    rank = integer_in(environ, "SLURM_PROCID")
    if size is None or size < 2 or rank is None or is_terminal(environ):
        return None
    node = integer_in(environ, "SLURM_NODEID") or 0
    numbers = environ.get("SLURM_GTIDS", "").strip()  # of the tasks that Slurm has started here; some users unset it
    tasks = numbers.count(",") + 1 if numbers else None
    listed = tasks_on(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), node)
    # A heterogeneous step lists the nodes by name, and numbers them by component.
    mixed = (integer_in(environ, "SLURM_HET_SIZE") or 1) > 1
    nodes = integer_in(environ, "SLURM_STEP_NUM_NODES") or integer_in(environ, "SLURM_NNODES")
    allocated = integer_in(environ, "SLURM_JOB_NUM_NODES")
    if not mixed and (
        (None not in (tasks, listed) and tasks != listed) or (nodes and allocated and nodes > allocated)
    ):
        return None
    local_rank = integer_in(environ, "SLURM_LOCALID")
    local_size = tasks if mixed and tasks else listed or tasks
    if not nodes:
        listing, name = node_list(environ)
        nodes = len(hosts(listing, name)) if listing else node + 1
    return Step(rank, size, local_rank, local_size, node, nodes)


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether the variables are those of a step that a user has started with srun."""
    number = environ.get("SLURM_STEP_ID", "").strip()
    return number.isdecimal() and int(number) < _SPECIAL_STEPS


def is_terminal(environ: Mapping[str, str]) -> bool:
    """Return whether a user started this process from a shell of `srun --pty`, or of salloc."""
    # Steps that are started from the shell inherit the variable, but not the terminal.
    return bool(environ.get("SLURM_PTY_PORT")) and _has_terminal()


def _has_terminal() -> bool:
    """Return whether this process belongs to a terminal, as a command that was typed there."""
    try:
        # Not isatty(): a typed command may be redirected.
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
        # Only an interactive shell gives each command a process group. `srun --pty accelerate launch`, or a script of
        # it, runs in all tasks, and the one with the terminal is a task like the others.
        return os.getpgrp() != os.getsid(0)
    except (OSError, AttributeError):
        return False


def node_list(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the nodes of the step, or else of the job: the list and the name of its variable."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = next((name for name in names if environ.get(name)), names[0])
    return environ.get(name, ""), name


def first_node(environ: Mapping[str, str]) -> str | None:
    """Return the name of node 0 of the step, or else of the job; None if no variable has it."""
    text, name = node_list(environ)
    if not text:
        return None
    # The list is sorted by name. In a heterogeneous step the nodes of the first component come first all the same.
    names = hosts(text, name)
    for component in range(integer_in(environ, "SLURM_HET_SIZE") or 0):
        variable = f"SLURM_JOB_NODELIST_HET_GROUP_{component}"
        if environ.get(variable) and (first := hosts(environ[variable], variable)[0]) in names:
            return first
    return names[0]


def port(environ: Mapping[str, str]) -> int | None:
    """Return a port that all tasks of a step compute, and other steps and jobs most likely otherwise."""
    job = integer_in(environ, "SLURM_JOB_ID")
    if job is None:
        return None
    return PORTS[(job + 977 * (integer_in(environ, "SLURM_STEP_ID") or 0)) % len(PORTS)]
