"""Functions started in several processes, from a notebook, a console or a test; `accelerate.launchers` is the public home.

A request is checked, and the agent of `accelerate launch` runs the function in forked processes. Importing this module imports
torch.
"""

import contextlib
import functools
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError

from accelerate.config.options import BY_NAME
from accelerate.extensions.notebook import torch_private
from accelerate.extensions.notebook.torch_private import end_with_the_parent, is_lost_by_fork
from accelerate.launch import elastic
from accelerate.launch.errors import LaunchError, Reporter, RunError, WorkerFailure, endings_of
from accelerate.launch.plan import BACKENDS, Rendezvous
from accelerate.runtime import failure
from accelerate.runtime.failure import PREEMPTED
from accelerate.runtime.ranks import DEFAULT_PORT

# A function of Python's does not run while the process waits inside torch, so these end a rank at once.
_SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


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


# -- forks and devices --------------------------------------------------------------------------------------------------


def method_for(device: Any) -> str:
    """Return how to start processes: "fork", or "spawn" where a fork would not work; then a line says why."""
    if not hasattr(os, "fork"):
        why = "this system cannot fork"
    elif device.type != "cpu" and _is_lost_by_forks(device.namespace()):
        why = f"this process uses the {device.type} device already, or has looked for it, and cannot be forked"
    else:
        return "fork"
    print(f"Starting fresh processes, which takes longer: {why}.")
    return "spawn"


def _is_lost_by_forks(namespace: Any) -> bool:
    """Whether a forked process could not use the device, also because this process has queried it; torch raises only in the fork."""
    if getattr(namespace, "is_initialized", bool)():
        return True
    if (process := os.fork()) == 0:
        try:
            os._exit(is_lost_by_fork(namespace))
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1] != 0


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
    """Return a function's name for the user; a `functools.partial` has the name of its function."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def check(request: Request) -> None:
    """Refuse what cannot run with a TypeError or ValueError that names the argument."""
    _check_function(request)
    for name, least in {"num_processes": 1, "num_nodes": 1, "node_rank": 0, "max_restarts": 0}.items():
        value = getattr(request, name)
        if name == "num_processes" and value is None:
            continue  # then the devices decide
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}; give an integer.")
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}.")
    if request.monitor_interval <= 0:
        raise ValueError(f"monitor_interval is {request.monitor_interval}; give a number of seconds above 0.")
    if request.node_rank >= request.num_nodes:
        raise ValueError(f"node_rank is {request.node_rank}; {request.num_nodes} machines are numbered from 0.")
    if request.rdzv_backend not in BACKENDS:
        raise ValueError(f"rdzv_backend is {request.rdzv_backend!r}; choose one of {', '.join(BACKENDS)}.")
    if request.precision is None:
        raise ValueError("mixed_precision is None; choose one of no, fp16, bf16, fp8.")


def _check_function(request: Request) -> None:
    function, args = request.function, request.args
    if not callable(function):
        hint = " Pass the function itself, without calling it." if function is None else ""
        raise TypeError(f"function is {function!r}, which cannot be called.{hint}")
    args_text = f"{args!r:.60}"
    if isinstance(args, (str, bytes, bytearray)) or not isinstance(args, Sequence):
        raise TypeError(f"args is {args_text}; give a tuple of the function's arguments, as in args=({args_text},).")
    with contextlib.suppress(ValueError):  # builtins need not have a signature
        try:
            inspect.signature(function).bind(*args)
        except TypeError as error:
            raise TypeError(f"args is {args_text}, which does not fit {name_of(function)}: {error}.") from None


# -- in each process ------------------------------------------------------------------------------------------------------


class Worker:
    """The call of a rank: the function, without the state that the process has inherited, and with a record of its failure.

    `may_run` says that all ranks are forked. Before that a rank must not connect to the launcher's store: a thread of the
    launcher would look up its name, and a process forked at that moment inherits the locked lock of glibc's resolver.
    """

    def __init__(self, function: Callable[..., Any], method: str = "fork") -> None:
        self.function = function
        self.may_run = multiprocessing.get_context(method).Event()
        self.__name__ = self.__qualname__ = name_of(function)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "function": _sent(self.function)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, function=pickle.loads(state["function"]))  # from the process that started this one

    def __call__(self) -> None:
        """Run the function. Its result is dropped: it would have to be sent to the parent and need not be picklable."""
        try:
            self._begin_afresh()
            self.function()
        except SystemExit as end:
            if end.code in (None, 0):
                return
            if end.code != PREEMPTED:  # then it has saved itself, and has not failed
                _leave(end)
            raise
        except BaseException as error:
            _leave(error)
            # Any other exception would make torch write its own report over this one; and torch takes an interrupted process
            # for one that is done, and waits for its result for ever.
            raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # it must not hide an error of the function
                    stream.flush()

    def _begin_afresh(self) -> None:
        # Torch requests SIGINT, which waits for Python; a process inside a collective would stay, with its memory on the GPU.
        end_with_the_parent(signal.SIGTERM)
        if os.getppid() != multiprocessing.parent_process().pid:
            os._exit(1)  # it had ended before that
        # Signals act as in a fresh process: the fork inherits the launcher's handlers.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (getattr(signal, name) for name in _SIGNALS):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        # GNU OpenMP does not survive a fork: a parallel region would wait for threads that only the parent has.
        torch.set_num_threads(1)
        _forget_states()
        self.may_run.wait()


def _sent(function: Callable[..., Any]) -> bytes:
    """Return a function as bytes: one of a cell by value, if cloudpickle is installed; else by its name, as pickle does."""
    pickler = importlib.import_module("cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle")
    try:
        return pickler.dumps(function)
    except Exception as error:
        hint = "Install cloudpickle, or move it into a module."
        raise LaunchError(f"{name_of(function)} cannot be sent to fresh processes: {error}. {hint}") from error


def on_core(function: Callable[..., Any], forked: bool, index: int, *args: Any) -> None:
    """Run the function on the TPU core `index`: in a process of torch_xla's, or for one core in this process."""
    if forked:
        _forget_states()
    function(*args)


def _forget_states() -> None:
    from accelerate.state import AcceleratorState, GradientState

    os.environ["FORK_LAUNCHED"] = "1"
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _leave(error: BaseException) -> None:
    """Write the error into the error file, without the launcher's own frames at the beginning of its traceback."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    with contextlib.suppress(OSError):  # a full disk must not hide the error itself
        failure.leave(os.environ[failure.ERROR_FILE], failure.record(type(error), error, trace or error.__traceback__))


# -- the agent -----------------------------------------------------------------------------------------------------------


class FunctionAgent(elastic.Agent):
    """The agent of processes that run a function and no program: torch keeps them in another place."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        may_run = worker_group.spec.entrypoint.may_run
        before = set(multiprocessing.active_children())
        may_run.clear()
        try:
            started = super()._start_workers(worker_group)
        except BaseException:  # torch forgets the processes of a start that fails half-way
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
                process.join()
            raise
        may_run.set()
        # A rank in a collective would wait for a rank that is done. The function's result, None, outlives it in a pipe.
        torch_private.let_finished_functions_end(self)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        statuses = self.statuses
        ended = {record.local_rank for record in result.failures.values() if getattr(record, "died", 0.0) is not None}
        if result.state == WorkerState.HEALTHY:
            # Processes that ended well before their function did (`os._exit(0)`): torch would wait for them for ever.
            ended = {
                local
                for local, status in statuses.items()
                if status == 0 and not torch_private.has_returned(self, local)
            }
        if not ended:
            return result
        failures = {}
        for local, process in self.processes.items():
            if statuses[local] or local in ended:
                record = ProcessFailure(local, process.pid, statuses[local], self.error_files[local])
                # Torch has stopped the processes that were alive at the agent's last look.
                record.died = self._died.get(local, time.time() if local in ended else None)
                failures[worker_group.workers[local].global_rank] = record
        return RunResult(state=WorkerState.FAILED, failures=failures)


# -- running -------------------------------------------------------------------------------------------------------------


def run(request: Request, environment: Mapping[str, str], num_processes: int, method: str = "fork") -> None:
    """Start processes on this machine for a checked request, with only these variables, and wait for their end.

    Raises WorkerError (a process failed), MeetingError (they could not meet), LaunchError (the machines disagree),
    KeyboardInterrupt, SystemExit (they have saved themselves; its status reports it), or torch's SignalException (another
    signal stopped them).
    """
    try:
        with tempfile.TemporaryDirectory(prefix="accelerate_launch_", ignore_cleanup_errors=True) as directory:
            function = functools.partial(request.function, *request.args)
            worker = Worker(function, method)
            rendezvous, agent = _rendezvous(request, num_processes)
            settings = {name: getattr(request, name) for name in ("max_restarts", "monitor_interval")}
            settings |= {"run_id": request.rdzv_id} if request.rdzv_id != "none" else {}
            settings |= {"agent": agent, "start_method": method}
            elastic.start(worker, (), environment, num_processes, rendezvous, directory, **settings)
    except ChildFailedError as error:
        endings = endings_of(error.failures)
        if endings[0].exitcode == PREEMPTED:
            raise SystemExit(PREEMPTED) from None
        raise _worker_error(request, endings) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    except RunError as error:
        if request.num_nodes > 1 and isinstance(error, _machines().FailedElsewhere):
            raise WorkerError(str(error)) from None
        raise MeetingError(str(error)) from error
    except (dist.DistError, RendezvousError, TimeoutError) as error:
        raise MeetingError(_why_no_rendezvous(request, error)) from error


def _rendezvous(request: Request, num_processes: int) -> tuple[Any, type[elastic.Agent]]:
    """Return how the processes find each other, and the class of the agent."""
    settings = request.rdzv_conf or {}
    if request.num_nodes == 1:
        return Rendezvous(request.rdzv_backend, port=request.chosen_port, settings=settings), FunctionAgent
    host, _, port = request.endpoint.rpartition(":")
    # With c10d machines number themselves, and node_rank may be 0 on each of them.
    number = request.node_rank if request.rdzv_backend == "static" or request.node_rank > 0 else None
    meet = Rendezvous(request.rdzv_backend, host.strip("[]"), int(port), settings, request.num_nodes, number)
    machines = _machines()
    return machines.MachineRendezvous(meet, num_processes, request.max_restarts, print), machines.MachineFunctionAgent


def _machines() -> Any:
    """Return the module for several machines; ValueError if the extension that it needs is not installed."""
    try:
        return importlib.import_module("accelerate.extensions.notebook.machines")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"num_nodes above 1 needs the extension 'machines', which is not installed: {error}."
        ) from None


def _worker_error(request: Request, failures: Sequence[WorkerFailure]) -> WorkerError:
    """Return the error for the caller: the first failure with its traceback, and a line for each group of others."""
    own_failures = [failure for failure in failures if failure.own] or list(failures)[:1]
    first = own_failures[0]
    words = first.words if first.exitcode else "ended with exit status 0, before its function was done"
    silent = f"The process {first.pid} {words}, and left no traceback."
    lines = [f"Rank {first.rank} failed in {name_of(request.function)}:", "", (first.traceback or silent).rstrip()]
    if others := Reporter.about(own_failures):
        lines += ["", *others]
    return WorkerError("\n".join(lines), own_failures)


def _why_no_rendezvous(request: Request, error: BaseException) -> str:
    if request.chosen_port and re.search("EADDRINUSE|address already in use", str(error), re.I):
        argument = "rdzv_endpoint" if request.rdzv_endpoint else "use_port"
        reason = f"{argument} asks for port {request.chosen_port}, which another program listens at"
        return f"{reason}. Choose another one, or omit {argument}: a free one is taken then."
    return f"The processes could not meet at 127.0.0.1, port {request.chosen_port or 'any'}: {error or type(error).__name__}"


def run_on_tpu(request: Request) -> None:
    """Start one process for each TPU core and wait for their end; with `num_processes=1`, use one core from here.

    Source: https://docs.pytorch.org/xla/master/learn/api-guide.html
    """
    library = getattr(importlib.import_module("torch_xla"), "_XLAC", None)
    if getattr(library, "_xla_runtime_is_initialized", lambda: False)():
        raise RuntimeError("This process uses the TPU already. Restart, and use it only inside the function.")
    starter = importlib.import_module("torch_xla.distributed.xla_multiprocessing")
    function = functools.partial(on_core, request.function, request.num_processes != 1)
    # It takes one process, or None for as many as there are cores.
    starter.spawn(function, args=tuple(request.args), nprocs=request.num_processes, start_method="fork")
