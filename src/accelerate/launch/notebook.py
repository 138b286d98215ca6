"""Functions started in several processes, from a notebook, a console or a test; `accelerate.launchers` is the public home.

A request is checked, and the agent of `accelerate launch` runs the function in forked processes.
"""

import functools
import importlib
import inspect
import re
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.config.exit_status import PREEMPTED
from accelerate.config.options import BY_NAME
from accelerate.launch.errors import LaunchError, Reporter, RunError, WorkerFailure, endings_of
from accelerate.launch.plan import Machines, Rendezvous

# Torch's default, for a port that the user has not chosen.
DEFAULT_PORT = 29500
_BACKENDS = ("static", "c10d")
# What the command line calls the arguments of `notebook_launcher`.
_NAMES = {
    "--main_process_ip": "master_addr",
    "--main_process_port": "use_port",
    "--machine_rank": "node_rank",
    "--num_machines": "num_nodes",
    "--num_processes": "num_processes",
    "--rdzv_conf join_timeout=SECONDS waits": "rdzv_conf={'join_timeout': SECONDS} waits",
    "Start the same command there": "Make the same call there",
}
_POISONED = re.compile("Cannot re-initialize|CUDA error: initialization error|in forked subprocess")
_USED_BEFORE = "The GPU was used before the processes were forked. Restart, and use it only inside the function."


class WorkerError(RuntimeError):
    """A process that was started has failed; the message holds its traceback.

    Attributes:
        failures: the failures of this machine, the first one first.
        rank: the number of the process that failed first.
        exitcode: its exit status; minus the number of the signal that killed it.
        traceback: its traceback, or None where it was killed.
    """

    def __init__(self, message: str, failures: Sequence[WorkerFailure] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        first = failures[0] if failures else None
        self.rank = first.rank if first else None
        self.exitcode = first.exitcode if first else None
        self.traceback = first.traceback if first else None

    def _render_traceback_(self, *_: Any) -> list[str]:
        # IPython calls this: in a cell, the frames of the launcher would only hide those of the worker.
        return [f"{type(self).__name__}: {self}"]


class MeetingError(RunError):
    """The processes could not meet: no answer came in time, the port is taken, or a machine was lost."""


# -- the request ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """The arguments of `accelerate.launchers.notebook_launcher`, under their names; see there."""

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    num_processes: int | None = None
    mixed_precision: str = "no"
    use_port: str | int = str(DEFAULT_PORT)
    master_addr: str = "127.0.0.1"
    node_rank: int = 0
    num_nodes: int = 1
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_conf: Mapping[str, Any] | None = None
    rdzv_id: str = "none"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_line_prefix_template: str | None = None

    @property
    def precision(self) -> str | None:
        """The mixed precision in its usual spelling; None is refused by `check`."""
        return BY_NAME["mixed_precision"].parse(self.mixed_precision)

    @property
    def port(self) -> int:
        """The port as a number; 0 for none."""
        return int(self.use_port or 0)

    @property
    def endpoint(self) -> str:
        """The address and port where several machines meet."""
        return self.rdzv_endpoint or f"{self.master_addr}:{self.port or DEFAULT_PORT}"

    @property
    def chosen_port(self) -> int:
        """The port at which the processes of one machine meet; 0, a free one, unless the user has chosen."""
        if self.rdzv_endpoint:
            return int(self.rdzv_endpoint.rpartition(":")[2])
        return 0 if self.port == DEFAULT_PORT else self.port


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for the user; a `functools.partial` has the name of what it calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def check(request: Request) -> None:
    """Refuse what cannot run, by the name of the argument.

    Args:
        request: what the user asks for.

    Raises:
        TypeError: an argument has the wrong type, or the function does not take `args`.
        ValueError: an argument has an impossible value.
    """
    _check_function(request)
    for name, least, hint in (
        ("num_processes", 1, "leave it out for one process per device"),
        ("num_nodes", 1, "it is the number of machines"),
        ("node_rank", 0, "machines are numbered from 0"),
        ("max_restarts", 0, "0 is for none"),
    ):
        value = getattr(request, name)
        if name == "num_processes" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}; give an integer ({hint}).")
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least} ({hint}).")
    if request.node_rank >= request.num_nodes:
        given = f"node_rank is {request.node_rank}, and num_nodes is {request.num_nodes}"
        raise ValueError(f"{given}: machines are numbered from 0 to {request.num_nodes - 1}.")
    if not isinstance(request.monitor_interval, (int, float)) or not request.monitor_interval > 0:
        raise ValueError(f"monitor_interval is {request.monitor_interval!r}; give a number of seconds above 0.")
    if request.precision is None:
        raise ValueError("mixed_precision is None; choose one of no, fp16, bf16, fp8.")
    _check_rendezvous(request)


def _check_function(request: Request) -> None:
    function, args = request.function, request.args
    if not callable(function):
        hint = " Pass the function itself, without calling it." if function is None else ""
        raise TypeError(f"function is {function!r}, which cannot be called.{hint}")
    given = repr(args) if len(repr(args)) <= 60 else f"{args!r:.57}..."
    if isinstance(args, (str, bytes, bytearray)) or not isinstance(args, Sequence):
        raise TypeError(f"args is {given}; give a tuple of the function's arguments, as in args=({given},).")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins need not have one
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = name_of(function)
        raise TypeError(f"args is {given}, which does not fit {name}{signature}: {error}.") from None


def _check_rendezvous(request: Request) -> None:
    if not re.fullmatch(r"\d{0,5}", str(request.use_port or "")) or request.port > 65535:
        raise ValueError(f"use_port is {request.use_port!r}; give a port up to 65535, or none for a free one.")
    if request.rdzv_backend not in _BACKENDS:
        raise ValueError(f"rdzv_backend is {request.rdzv_backend!r}; choose one of {', '.join(_BACKENDS)}.")
    if request.rdzv_conf is not None and not isinstance(request.rdzv_conf, Mapping):
        raise TypeError(f"rdzv_conf is {request.rdzv_conf!r}; give a dictionary, such as {{'timeout': 60}}.")
    if request.rdzv_endpoint and not re.fullmatch(r".+:\d{1,5}", request.rdzv_endpoint):
        raise ValueError(f"rdzv_endpoint is {request.rdzv_endpoint!r}; give host:port.")


# -- running -------------------------------------------------------------------------------------------------------------


def run(request: Request, environment: Mapping[str, str], num_processes: int) -> None:
    """Start processes and wait for their end.

    Args:
        request: what the user asks for, checked.
        environment: all variables of the processes.
        num_processes: how many, on this machine.

    Raises:
        WorkerError: a process failed.
        MeetingError: the processes could not meet.
        LaunchError: the machines do not agree.
        KeyboardInterrupt: the user interrupted; all processes are gone.
        SystemExit: the processes have saved themselves after a signal; the status is that of such a run.
        torch.distributed.elastic.multiprocessing.api.SignalException: another signal stopped them.
    """
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from accelerate.launch import elastic, notebook_worker
    from accelerate.launch.machine_rendezvous import FailedElsewhere

    reporter = Reporter()
    try:
        with tempfile.TemporaryDirectory(prefix="accelerate_launch_", ignore_cleanup_errors=True) as directory:
            worker = notebook_worker.Worker(request.function, request.log_line_prefix_template)
            config, agent, more = _configured(request, num_processes, directory)
            elastic.start(config, worker, tuple(request.args), {**more, **environment}, agent=agent)
    except ChildFailedError as error:
        found = endings_of(error.failures)
        if found[0].exitcode == PREEMPTED:
            raise SystemExit(PREEMPTED) from None
        raise _worker_error(request, found, reporter) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    except FailedElsewhere as error:
        raise WorkerError(_in_arguments(error)) from None
    except LaunchError as error:
        raise LaunchError(_in_arguments(error)) from None
    except RunError as error:
        raise MeetingError(_in_arguments(error)) from error
    except (dist.DistError, RendezvousError, TimeoutError) as error:
        raise MeetingError(_why_no_rendezvous(request, error)) from error


def _configured(request: Request, num_processes: int, directory: str) -> tuple[Any, type, Mapping[str, str]]:
    """Return torch's configuration, the class of its agent, and further variables of the processes."""
    from accelerate.launch import elastic, notebook_worker
    from accelerate.launch.runners import local

    settings = request.rdzv_conf or {}
    agent, variables = notebook_worker.FunctionAgent, {}
    rendezvous = Rendezvous(request.rdzv_backend, port=request.chosen_port, settings=settings)
    if request.num_nodes > 1:
        agent = notebook_worker.MachineFunctionAgent
        host, _, port = request.endpoint.rpartition(":")
        meet = Rendezvous(request.rdzv_backend, host.strip("[]"), int(port), settings)
        # With c10d machines number themselves, and node_rank may be 0 on each of them.
        numbered = request.rdzv_backend == "static" or request.node_rank > 0
        machines = Machines(request.num_nodes, request.node_rank if numbered else None)
        rendezvous, variables = local.between_machines(
            meet, machines, num_processes, lambda line: print(_in_arguments(line)), restarts=request.max_restarts
        )
    options = {name: getattr(request, name) for name in ("max_restarts", "monitor_interval")}
    config = elastic.make_config(num_processes, rendezvous, directory, start_method="fork", **options)
    if request.rdzv_id != "none":
        config.run_id = request.rdzv_id
    return config, agent, variables


def _worker_error(request: Request, failures: Sequence[WorkerFailure], reporter: Reporter) -> WorkerError:
    """Return the error for the caller: the first failure with its traceback, and a line for each group of others."""
    found = [failure for failure in failures if failure.own] or list(failures)[:1]
    first = found[0]
    words = "ended with exit status 0, before its function was done" if first.exitcode == 0 else first.words
    silent = f"The process {first.pid} {words}, and left no traceback."
    lines = [f"Rank {first.rank} failed in {name_of(request.function)}:", "", (first.traceback or silent).rstrip()]
    if _POISONED.search(first.traceback or ""):
        lines += ["", _USED_BEFORE]
    if others := reporter.about(found):
        lines += ["", *others]
    return WorkerError("\n".join(lines), found)


def _in_arguments(message: object) -> str:
    text = str(message)
    for flag, name in _NAMES.items():
        text = text.replace(flag, name)
    return text


def _why_no_rendezvous(request: Request, error: BaseException) -> str:
    if request.chosen_port and re.search("EADDRINUSE|address already in use", str(error), re.I):
        argument = "rdzv_endpoint" if request.rdzv_endpoint else "use_port"
        taken = f"{argument} asks for port {request.chosen_port}, which another program listens at"
        return f"{taken}. Choose another one, or leave {argument} out: a free one is taken then."
    return f"The processes could not meet at 127.0.0.1, port {request.chosen_port or 'any'}: {error or type(error).__name__}"


def run_on_tpu(request: Request) -> None:
    """Start one process for each TPU core and wait for their end; with `num_processes=1`, use one core from here.

    Args:
        request: what the user asks for, checked.

    Raises:
        RuntimeError: this process uses the TPU already.

    Source: https://docs.pytorch.org/xla/master/learn/api-guide.html
    """
    from accelerate.launch import notebook_worker

    library = getattr(importlib.import_module("torch_xla"), "_XLAC", None)
    if getattr(library, "_xla_runtime_is_initialized", lambda: False)():
        raise RuntimeError(
            "This process uses the TPU already. Restart the notebook, and use it only inside the function."
        )
    starter = importlib.import_module("torch_xla.distributed.xla_multiprocessing")
    on_core = functools.partial(notebook_worker.on_core, request.function, request.num_processes != 1)
    # It takes one process, or None for as many as there are cores.
    starter.spawn(on_core, args=tuple(request.args), nprocs=request.num_processes, start_method="fork")
