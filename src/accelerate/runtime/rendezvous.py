"""How a process finds the others: from ranks to a process group, by way of a key-value store. `runtime.ranks` reads the ranks."""

import atexit
import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, TCPStore

from accelerate import comm
from accelerate.base.environment import integer_in
from accelerate.base.versions import is_torch_version
from accelerate.runtime import torch_private
from accelerate.runtime.ranks import ALONE, Ranks, export, resolve

LOOPBACK = "127.0.0.1"


def uses_libuv() -> bool:
    """Return whether libuv serves a store, as USE_LIBUV says; torch for Windows has none."""
    return os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"


def serve(host: str, port: int, timeout: Any, **settings: Any) -> TCPStore:
    """Return a new store that listens at all addresses of this machine; `host` is the one by which others know it."""
    # Up to 2.7, and perhaps 2.8, torch's libuv takes no socket that listens already.
    takes = "master_listen_fd" not in settings or not is_torch_version("<", "2.9")
    return TCPStore(
        host, port, None, True, timeout, wait_for_workers=False, use_libuv=takes and uses_libuv(), **settings
    )


def serve_this_machine(port: int, timeout: Any, **settings: Any) -> TCPStore:
    """Return a new store that no other machine reaches; port 0 takes a free one."""
    if os.name != "posix":
        return serve(LOOPBACK, port, timeout, **settings)
    try:
        listener = socket.create_server((LOOPBACK, port), backlog=2048)
    except OSError as error:
        raise DistNetworkError(f"{LOOPBACK}, port {port}: {error}") from None
    settings |= {"port": listener.getsockname()[1], "master_listen_fd": listener.detach()}  # the store closes it
    return serve(LOOPBACK, timeout=timeout, **settings)


Waiting = Callable[[Any], contextlib.AbstractContextManager]


def init_process_group(ranks: Ranks, backend: str, waiting: Waiting = contextlib.nullcontext, **settings: Any) -> None:
    """Join the other processes, with settings of torch's function; None is torch's default.

    Inside ``waiting(store)`` the ranks wait for each other.

    Collective: call on every rank.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    if ranks == ALONE:
        # A group of one needs no address, so it cannot collide with another job's port either.
        settings.setdefault("store", dist.HashStore())
        settings.pop("init_method", None)
    elif "init_method" not in settings and "store" not in settings:
        export(ranks)
    if "store" not in settings:
        settings["store"] = _join_group(ranks, settings.pop("init_method", "env://"), settings.get("timeout"))
    with waiting(settings["store"]):
        dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world_size, **settings)
    fork_when_quiet()
    global _leaves_at_exit
    if backend == "gloo" and not _leaves_at_exit:
        atexit.register(_leave)
        _leaves_at_exit = True


def _join_group(ranks: Ranks, url: str, timeout: timedelta | None) -> Any:
    """Return a store that the ranks share and that holds nothing yet.

    The first group's store serves the following ones as well, each under a prefix. A store per group would not do:
    torchrun's is the same one, with the old addresses in it, so a process that is early connects to a listener that is
    gone; and the one of rank 0 goes down with its group, possibly after another rank has connected to it again.
    """
    place = (url, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), ranks.rank, ranks.world_size)
    if place not in _stores:
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
        is_here = ranks.world_size == ranks.local_world_size and place[1] in (LOOPBACK, "localhost")
        store = None
        if url == "env://" and ranks.rank == 0 and is_here and not agents:
            limit = timeout or timedelta(minutes=30)  # torch's own
            # Torch lets stores of one process share a port: the user's groups, before this one or after it, meet there as well.
            with contextlib.suppress(dist.DistNetworkError):
                store = serve_this_machine(int(os.environ["MASTER_PORT"]), limit, multi_tenant=True)
        if store is None:
            limit = {} if timeout is None else {"timeout": timeout}
            store, _, _ = next(dist.rendezvous(url, ranks.rank, ranks.world_size, **limit))
        _stores[place] = [store, 0]
    shared = _stores[place]
    shared[1] += 1  # all ranks count the same
    return dist.PrefixStore(f"accelerate/group/{shared[1]}", shared[0])


_stores: dict[tuple[Any, ...], list[Any]] = {}  # place to store, and how many groups have met there
_leaves_at_exit = False


def connection(store: Any) -> Any:
    """Return a store with a separate connection, if possible: a thread in `store.wait` blocks all other requests."""
    try:
        return store.clone()
    except Exception:  # older torch, and stores written in Python, cannot
        return store


# Long enough for a thread that waits for the interpreter lock to get it; a process ends this much later.
_SETTLING_S = 0.05


def _leave() -> None:
    """Leave a gloo group before the interpreter ends: its threads abort a process that ends at the same time (torch 2.13).

    A thread of gloo drops its last references to tensors after the collective has returned, and needs the interpreter
    lock for that. A process whose interpreter is ending then dies with "terminate called without an active exception".
    Torch offers nothing to wait for, so the lock is released for a moment. Plain torch programs abort likewise.
    """
    time.sleep(_SETTLING_S)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        comm.forget()
        dist.destroy_process_group()


def live_ranks() -> Ranks:
    """Return the ranks of the live process group; the environment adds the local ranks."""
    fork_when_quiet()
    rank, size = dist.get_rank(), dist.get_world_size()
    launched = resolve() if os.environ.get("RANK") == str(rank) else None
    if launched is not None and launched.world_size == size:
        return Ranks(rank, size, launched.local_rank, launched.local_world_size, "process group")
    local_rank, local_size = integer_in(os.environ, "LOCAL_RANK"), integer_in(os.environ, "LOCAL_WORLD_SIZE")
    if local_rank is None or local_rank < 0:  # started without a launcher, as `torch.multiprocessing.spawn` does
        local_rank, local_size = rank, size
    return Ranks(rank, size, local_rank, local_size, "process group")


def check_devices_are_distinct(ranks: Ranks, device: torch.device, backend: str) -> None:
    """Raise ValueError on every rank if two processes would use one accelerator through a backend that forbids it.

    NCCL and its relatives hang or abort in the first collective then. Only called where a machine runs more processes
    than it shows devices to them; every rank of that machine must call it.
    """
    properties = getattr(torch, device.type).get_device_properties(device)
    identity = str(getattr(properties, "uuid", None) or device)
    store = dist.PrefixStore(f"accelerate/device/{socket.gethostname()}", torch_private.default_store())
    rank = str(ranks.local_rank)
    holder = store.compare_set(f"of {identity}", "", rank).decode()
    if holder != rank:
        store.compare_set(
            "shared", "", " and ".join(sorted((holder, rank), key=int)) + f" would share one device ({identity})"
        )
    if store.add("come", 1) == (ranks.local_world_size or 1):
        store.set("outcome", store.compare_set("shared", "", " "))
    shared = store.get("outcome").decode().strip()
    if shared:
        dist.destroy_process_group()
        raise ValueError(
            f"The local processes {shared}, which backend={backend!r} does not allow. Start as many processes as there are "
            "devices, or pass InitProcessGroupKwargs(backend='gloo') (slower) to share them, for replicas (DDP) only."
        )


# -- forking next to the threads of a process group ----------------------------------------------------------------
#
# When a collective is over, its thread frees memory and enters the interpreter for that. To enter, it takes a lock of the
# interpreter without holding the GIL, so a `fork` can copy that lock while it is closed. CPython before 3.12 waits for it
# in the child before renewing it: the child hangs in `os.fork`. An example is a data loader that starts worker processes
# right after a collective or a backward pass. A run with new workers in each epoch hung within seconds. So a fork waits
# until these threads sleep, microseconds later. This covers every fork of the process, not only the prepared loaders.

_TASKS = Path("/proc/self/task")
# torch's native threads: pt_gloo_runloop, pt_nccl_watchdg, pt_autograd_0, ...
_PREFIX = b"(pt_"
_PAUSE_S = 0.0001
# A thread that computes for so long (a reduction of a large tensor) is not about to enter the interpreter.
_LIMIT_S = 0.2
# On a busy machine a thread may miss its turn once.
_ROUNDS, _ROUND_S = 4, 0.001


@functools.cache
def fork_when_quiet() -> None:
    """Let every later `os.fork` of this process, and its end, wait for torch's threads. Linux only; calling it again does nothing."""
    if _TASKS.is_dir():
        os.register_at_fork(before=_rest)
        atexit.register(wait_for_threads)


def wait_for_threads() -> None:
    """Wait until torch's threads are done with finished collectives. Call it before a group is freed.

    A caller that frees a group waits for its threads while it holds the interpreter. A thread that is about to enter the
    interpreter, to free memory of the last collective, would wait for this process: a deadlock.

    Not a collective.
    """
    for _ in range(_ROUNDS if _TASKS.is_dir() else 0):
        time.sleep(_ROUND_S)  # a thread that waits for the interpreter gets it now, or is seen to want to run
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
