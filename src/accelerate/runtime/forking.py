"""Forking beside a process group's threads: wait until they rest.

When a collective is over, the thread that ran it frees what belonged to it, and enters the interpreter for that. To enter,
it takes a lock of the interpreter's without holding the GIL, so a `fork` can copy that lock while it is closed. CPython
before 3.12 waits for it in the child, before it would renew it: the child hangs in `os.fork`. A data loader that starts
worker processes straight after a collective or a backward pass is such a child; a run in which each epoch starts workers
met it within seconds.

Here a fork waits until these threads sleep, as they do microseconds later. It covers every fork of the process, not the
prepared loaders alone.
"""

import atexit
import os
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
# torch's native threads: pt_gloo_runloop, pt_nccl_watchdg, pt_autograd_0, ...
_PREFIX = b"(pt_"
_PAUSE_S = 0.0001
# A thread that computes for so long (a reduction of a large tensor) is not about to enter the interpreter.
_LIMIT_S = 0.2
# On a busy machine a thread may miss its turn once.
_ROUNDS, _ROUND_S = 4, 0.001

_registered = False


def fork_when_quiet() -> None:
    """Let every later `os.fork` of this process, and its end, wait for torch's threads. Linux only; calling it again does nothing."""
    global _registered
    if not _registered and _TASKS.is_dir():
        _registered = True
        os.register_at_fork(before=_rest)
        atexit.register(settle)


def settle() -> None:
    """Wait until torch's threads are done with collectives that are over. Any rank, alone; before a process group is given up.

    Whoever frees a process group waits for its threads, and holds the interpreter meanwhile. A thread that is about to enter the
    interpreter, to free what belonged to the last collective, and this process would wait for each other for ever.
    """
    for _ in range(_ROUNDS if _TASKS.is_dir() else 0):
        time.sleep(_ROUND_S)  # whoever waits for the interpreter gets it now, or is seen to want to run
        _rest()


def _rest() -> None:
    tasks = [_TASKS / name / "stat" for name in os.listdir(_TASKS)]
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end and (tasks := [task for task in tasks if _runs(task)]):
        time.sleep(_PAUSE_S)


def _runs(task: Path) -> bool:
    """Whether this is one of torch's threads, and awake."""
    try:
        stat = task.read_bytes()
    except OSError:  # it has ended
        return False
    name = stat.find(b" (") + 1
    return stat.startswith(_PREFIX, name) and stat.startswith((b"R", b"D"), stat.rfind(b")") + 2)
