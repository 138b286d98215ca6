"""Functions started in several processes, from a notebook, a console or a test; `accelerate.launchers` is the public home.

A request is checked, the function is prepared for forked or fresh processes, and the agent of `accelerate launch` runs them.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from accelerate.config.exit_status import PREEMPTED
from accelerate.config.options import BY_NAME
from accelerate.launch.errors import LaunchError, Reporter, RunError, WorkerFailure, endings_of
from accelerate.launch.plan import Rendezvous

FORK, SPAWN = "fork", "spawn"
# Torch's default, for a port that the user has not chosen.
DEFAULT_PORT = 29500
_BACKENDS = ("static", "c10d")
_TIMEOUT_S = 600
_PREFIX = "[rank ${rank}] "
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
_OTHER_MACHINES = (
    "Processes of other machines are reported there: where a connection broke, look for the cause on those."
)
# Libraries that are known to use a GPU when they are imported, or soon afterwards.
_SUSPECTS = (
    "apex bitsandbytes cudf cuml cupy deepspeed faiss flash_attn jax mamba_ssm numba.cuda onnxruntime pycuda tensorflow "
    "tensorrt torch_tensorrt transformer_engine triton unsloth vllm xformers"
)
_launching = threading.Lock()


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

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.failures)

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
        text = str(self.use_port).strip()
        return int(text) if text not in ("", "None") else 0

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

    @property
    def join_timeout(self) -> float:
        """For how long machines wait for each other, in seconds."""
        settings = self.rdzv_conf or {}
        return float(settings.get("join_timeout", settings.get("timeout", _TIMEOUT_S)))


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
        raise ValueError(
            f"node_rank is {request.node_rank}, and num_nodes is {request.num_nodes}: machines are numbered from 0 to "
            f"{request.num_nodes - 1}."
        )
    interval = request.monitor_interval
    if isinstance(interval, bool) or not isinstance(interval, (int, float)) or not 0 < interval < float("inf"):
        raise ValueError(f"monitor_interval is {interval!r}; give a number of seconds above 0.")
    if request.precision is None:
        raise ValueError("mixed_precision is None; choose one of no, fp16, bf16, fp8.")
    _check_rendezvous(request)


def _check_function(request: Request) -> None:
    function, args = request.function, request.args
    if not callable(function):
        hint = " Pass the function itself, without calling it." if function is None else ""
        raise TypeError(f"function is {function!r}, which cannot be called.{hint}")
    called = getattr(function, "func", function)  # of a functools.partial
    if not inspect.isroutine(called):
        called = type(called).__call__
    for kind, known in (("a coroutine", inspect.iscoroutinefunction), ("a generator", inspect.isgeneratorfunction)):
        if known(called):
            raise TypeError(
                f"function is {name_of(function)}, {kind} function: calling it runs nothing of it. Give a plain function that "
                "runs it to its end."
            )
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
    try:
        port = request.port
    except ValueError:
        port = -1
    if not 0 <= port < 65536:
        raise ValueError(
            f"use_port is {request.use_port!r}; give a port from 1 to 65535, or leave it out for a free one."
        )
    if request.rdzv_backend not in _BACKENDS:
        raise ValueError(f"rdzv_backend is {request.rdzv_backend!r}; choose one of {', '.join(_BACKENDS)}.")
    if request.rdzv_conf is not None and not isinstance(request.rdzv_conf, Mapping):
        raise TypeError(f"rdzv_conf is {request.rdzv_conf!r}; give a dictionary, such as {{'timeout': 60}}.")
    if request.rdzv_endpoint:
        host, _, number = request.rdzv_endpoint.rpartition(":")
        if not host or not number.isdigit() or int(number) > 65535:
            raise ValueError(f"rdzv_endpoint is {request.rdzv_endpoint!r}; give host:port.")
    if request.num_nodes > 1 and not request.rdzv_endpoint and not port:
        raise ValueError(
            f"use_port is {request.use_port!r}, and num_nodes is {request.num_nodes}: several machines must all know the port. "
            "Give one, the same on each of them."
        )


# -- whether this process can be forked ----------------------------------------------------------------------------------

_stacks: dict[str, list[traceback.FrameSummary]] = {}
_watched: set[str] = set()


def watch(names: tuple[str, ...] = ("cuda", "xpu")) -> None:
    """Remember the stack of the first use of a device; later calls do nothing.

    Torch keeps a list of what to call then, so nothing of it is replaced, and until then nothing is called.

    Args:
        names: torch's modules for devices.
    """
    for name in names:
        namespace = getattr(torch, name, None)
        later = getattr(namespace, "_lazy_call", None)
        if later is not None and name not in _watched and not _is_initialized(namespace):
            _watched.add(name)
            later(functools.partial(_remember, name))


def _is_initialized(namespace: Any) -> bool:
    return bool(getattr(namespace, "is_initialized", lambda: False)())


def _remember(name: str) -> None:
    # Torch gives the device up if this raises. The text of the lines is read when it is printed.
    with contextlib.suppress(Exception):
        stack = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
        _stacks.setdefault(name, stack[::-1])


def is_used(device: Any) -> bool:
    """Return whether this process uses a kind of device already; `device` is a row of `accelerate.devices`."""
    return device.type != "cpu" and _is_initialized(device.namespace())


def survives_fork(device: Any) -> bool:
    """Return whether a forked process could use a kind of device, by forking one that asks torch.

    Merely counting CUDA devices without NVML spoils it as well, and only a forked process sees that.

    Args:
        device: a row of `accelerate.devices`.
    """
    if device.type == "cpu" or not hasattr(os, "fork"):
        return hasattr(os, "fork")
    if is_used(device):
        return False
    spoiled = getattr(device.namespace(), "_is_in_bad_fork", None)
    if spoiled is None:
        return True
    with warnings.catch_warnings():
        # Python 3.12 and later warn of threads; this child only asks, and is gone.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(bool(spoiled()))
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def culprit(device_type: str) -> str:
    """Return sentences about the first use of a kind of device: the recorded place, or what looks like it.

    Args:
        device_type: torch's name of the device.
    """
    if device_type in _stacks:
        return _first_use(_stacks[device_type])
    main = list(vars(sys.modules["__main__"]).items())
    holders = [name for name, value in main if _lies_on(value, device_type)]
    libraries = [name for name in _SUSPECTS.split() if name in sys.modules]
    text = (
        "It happened before accelerate was imported, so the place is not known: import accelerate first to learn it."
    )
    for title, names in (("Variables that lie on it", holders), ("Loaded libraries that may have done so", libraries)):
        text += f" {title}: {', '.join(names)}." if names else ""
    return text


def _first_use(stack: list[traceback.FrameSummary]) -> str:
    outside = [frame for frame in stack if "/torch/" not in _path(frame) and frame.filename != __file__]
    if not outside:
        return "Torch itself did it."
    sentence = f"It was first used by {_where(outside[-1])}."
    # The library's line alone does not say which line of the user's made it run.
    standard = ("<frozen", os.path.dirname(os.__file__).replace("\\", "/"))
    users = [one for one in outside if "-packages/" not in _path(one) and not _path(one).startswith(standard)]
    if users and users[-1] is not outside[-1]:
        sentence += f" That was called by {_where(users[-1])}."
    return sentence


def _path(frame: traceback.FrameSummary) -> str:
    return frame.filename.replace("\\", "/")


def _where(frame: traceback.FrameSummary) -> str:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = (getattr(getattr(shell, "compile", None), "_filename_map", None) or {}).get(frame.filename)
    file = f"cell In[{cell}]" if cell else re.sub(".*/(site|dist)-packages/", "", _path(frame))
    return f"{file}, line {frame.lineno}, in {frame.name}{f': {frame.line}' if frame.line else ''}"


def _lies_on(value: Any, device_type: str) -> bool:
    try:
        if isinstance(value, torch.nn.Module):
            value = next(value.parameters(), None)
        return isinstance(value, torch.Tensor) and value.device.type == device_type
    except Exception:  # a class of the user's, asked in the middle of an error
        return False


def is_importing_main() -> bool:
    """Return whether this is a fresh process that is still importing the main program of its parent."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


# -- running -------------------------------------------------------------------------------------------------------------


def run(request: Request, method: str, environment: Mapping[str, str], num_processes: int) -> None:
    """Start processes and wait for their end.

    Args:
        request: what the user asks for, checked.
        method: "fork" or "spawn"; for the latter, `request` comes from `sendable`.
        environment: all variables of the processes.
        num_processes: how many, on this machine.

    Raises:
        WorkerError: a process failed.
        MeetingError: the processes could not meet.
        LaunchError: the machines do not agree.
        KeyboardInterrupt: the user interrupted; all processes are gone.
        SystemExit: the processes have saved themselves after a signal; the status is that of such a run.
        torch.distributed.elastic.multiprocessing.api.SignalException: another signal stopped them.
        RuntimeError: another thread runs a launcher.
    """
    if not _launching.acquire(blocking=False):
        raise RuntimeError(
            "Another thread of this process is running a launcher. Wait for it, or start the second run in a process of its own."
        )
    try:
        with (
            _undisturbed(),
            tempfile.TemporaryDirectory(prefix="accelerate_launch_", ignore_cleanup_errors=True) as directory,
        ):
            _start(request, method, environment, num_processes, directory)
    finally:
        _launching.release()


def _start(request: Request, method: str, environment: Mapping[str, str], num_processes: int, directory: str) -> None:
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import Std
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from accelerate.launch import elastic, notebook_worker
    from accelerate.launch.machine_rendezvous import FailedElsewhere

    # Forked processes have the streams of a notebook; fresh ones have descriptors alone.
    if request.log_line_prefix_template is None and method != FORK and not descriptors_are_shown():
        request = replace(request, log_line_prefix_template=_PREFIX)
    prefixed = request.log_line_prefix_template is not None
    worker = notebook_worker.Worker(request.function, method == FORK, to_files=prefixed)
    reporter = Reporter()
    try:
        config, agent, more = _configured(request, num_processes, directory, method)
        if prefixed:  # torch puts it before lines that it reads from files, and only there
            config.logs_specs = notebook_worker.WrittenByWorkers(log_dir=directory, tee=Std.ALL)
        elastic.start(config, worker, tuple(request.args), {**more, **environment}, agent=agent)
    except ChildFailedError as error:
        found = endings_of(error.failures)
        if found[0].exitcode == PREEMPTED:
            raise SystemExit(PREEMPTED) from None
        raise worker_error(request, found, reporter) from None
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


def _configured(
    request: Request, num_processes: int, directory: str, method: str
) -> tuple[Any, type, Mapping[str, str]]:
    """Return torch's configuration, the class of its agent, and further variables of the processes."""
    from accelerate.launch import elastic, hardware, notebook_worker
    from accelerate.launch.machine_rendezvous import MachineRendezvous

    settings = dict(request.rdzv_conf or {})
    rest = {
        "start_method": method,
        "max_restarts": request.max_restarts,
        "monitor_interval": request.monitor_interval,
        "log_line_prefix_template": request.log_line_prefix_template,
    }
    if request.num_nodes == 1:
        rendezvous = Rendezvous(request.rdzv_backend, port=request.chosen_port, settings=settings)
        config = elastic.make_config(num_processes, rendezvous, directory, **rest)
        config.run_id = config.run_id if request.rdzv_id == "none" else request.rdzv_id
        return config, notebook_worker.FunctionAgent, {}
    host, _, port = request.endpoint.rpartition(":")
    host = host.strip("[]")
    address = hardware.local_address(host, int(port))
    rendezvous = MachineRendezvous(
        host,
        int(port),
        request.num_nodes,
        # With c10d machines number themselves, and node_rank may be 0 on each of them.
        None if request.rdzv_backend == "c10d" and request.node_rank == 0 else request.node_rank,
        num_processes,
        join_timeout=request.join_timeout,
        heartbeat_timeout=float(settings.get("heartbeat_timeout", 30)),
        report=lambda line: print(_in_arguments(line)),
        restarts=request.max_restarts,
    )
    config = elastic.make_config(num_processes, rendezvous, directory, **rest)
    return config, notebook_worker.MachineFunctionAgent, hardware.gloo_variables(address)


def descriptors_are_shown() -> bool:
    """Return whether the user sees what is written to descriptor 1: in a notebook, only if its kernel reads it."""
    return isinstance(sys.stdout, io.TextIOWrapper) or getattr(sys.stdout, "watch_fd_thread", None) is not None


def worker_error(request: Request, failures: Sequence[WorkerFailure], reporter: Reporter) -> WorkerError:
    """Return the error for the caller: the first failure with its traceback, and a line for each group of others.

    Args:
        request: what the user asked for.
        failures: what `endings_of` returned.
        reporter: made before the processes were started.
    """
    found = [failure for failure in failures if failure.own] or list(failures)[:1]
    first = found[0]
    words = "ended with exit status 0, before its function was done" if first.exitcode == 0 else first.words
    silent = f"The process {first.pid} {words}, and left no traceback."
    lines = [f"Rank {first.rank} failed in {name_of(request.function)}:", "", (first.traceback or silent).rstrip()]
    if _POISONED.search(first.traceback or ""):
        lines += ["", _USED_BEFORE]
    if others := reporter.about(found):
        lines += ["", *others]
    if request.num_nodes > 1:
        lines += ["", _OTHER_MACHINES]
    return WorkerError("\n".join(lines), found)


def _in_arguments(message: object) -> str:
    text = str(message)
    for flag, name in _NAMES.items():
        text = text.replace(flag, name)
    return text


def _why_no_rendezvous(request: Request, error: BaseException) -> str:
    if request.chosen_port and re.search("EADDRINUSE|address already in use", str(error), re.I):
        argument = "rdzv_endpoint" if request.rdzv_endpoint else "use_port"
        return (
            f"{argument} asks for port {request.chosen_port}, which another program listens at. Choose another one, or leave "
            f"{argument} out: a free one is taken then."
        )
    return f"The processes could not meet at 127.0.0.1, port {request.chosen_port or 'any'}: {error or type(error).__name__}"


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep this process's handlers of signals, and its output without torch's words about processes that it stops."""
    # Torch's start leaves its handler of this signal; the agent restores those of the others.
    quit_signal = getattr(signal, "SIGQUIT", None) if threading.current_thread() is threading.main_thread() else None
    handler = quit_signal and signal.getsignal(quit_signal)
    logger = importlib.import_module("torch.multiprocessing.spawn").log
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if quit_signal is not None and handler is not None:
            signal.signal(quit_signal, handler)


@contextlib.contextmanager
def variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for as long as the block runs.

    Args:
        wanted: the variables.
    """
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


# -- TPUs ----------------------------------------------------------------------------------------------------------------


def run_on_tpu(request: Request, environment: Mapping[str, str]) -> None:
    """Start one process for each TPU core and wait for their end; with `num_processes=1`, use one core from here.

    Args:
        request: what the user asks for, checked.
        environment: all variables of the processes.

    Raises:
        RuntimeError: this process uses the TPU already.
        WorkerError: a process failed.

    Source: https://docs.pytorch.org/xla/master/learn/api-guide.html
    """
    from accelerate.launch import notebook_worker

    library = getattr(importlib.import_module("torch_xla"), "_XLAC", None)
    if getattr(library, "_xla_runtime_is_initialized", lambda: False)():
        raise RuntimeError(
            "This process uses the TPU already, and no further processes can be started for it. Restart the notebook, and call "
            "`xla_device()`, `.to(...)` and the like only inside the training function."
        )
    starter = importlib.import_module("torch_xla.distributed.xla_multiprocessing")
    reporter = Reporter()
    with variables(environment), tempfile.TemporaryDirectory(prefix="accelerate_launch_") as directory:
        if request.num_processes == 1:
            on_one_core = functools.partial(notebook_worker.on_one_core, request.function)
            starter.spawn(on_one_core, args=tuple(request.args), nprocs=1, start_method=FORK)
            return
        rank = functools.partial(notebook_worker.tpu_rank, request.function, directory, request.num_processes)
        try:
            # It starts as many as there are cores, and takes no other number.
            starter.spawn(rank, args=tuple(request.args), nprocs=None, start_method=FORK)
        except (Exception, SystemExit):
            records = [json.loads(path.read_text("utf-8"))["accelerate"] for path in Path(directory).glob("*.json")]
            records.sort(key=lambda record: record["time"])
            found = [WorkerFailure(record["rank"], record["pid"], 1, record, record["time"]) for record in records]
            if found:
                raise worker_error(request, found, reporter) from None
            raise
