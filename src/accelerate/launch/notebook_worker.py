"""Functions as ranks: what runs in each process, and torch's agent for such processes. Importing this module imports torch."""

import contextlib
import ctypes
import dataclasses
import importlib
import importlib.util
import inspect
import io
import linecache
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch import elastic, machine_rendezvous
from accelerate.launch.errors import Seen
from accelerate.launch.notebook import Request, name_of
from accelerate.runtime import failure

_OUTPUT = {1: "stdout.log", 2: "stderr.log"}
# A function of Python's does not run while the process waits inside torch, so these end a rank at once.
_SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_INTERRUPTED = 130
# What an entry of `linecache` holds, by position: its time of change, which text that is in no file has not, and its lines.
_TIME, _LINES = 1, 2
# A new process has one thread, so the resolver's lock is free in it at once, or never.
_LOCK_S, _FORKS = 1.0, 20


class CannotSendError(RuntimeError):
    """The function cannot be sent to another process."""


class Worker:
    """What a rank runs: the function, without what the process has inherited, and with a record of its failure.

    Args:
        function: the function.
        forked: the process is forked.
        to_files: put its output into files, which torch reads and prints with a prefix.
        error_file: where it leaves the record; None is where torch's launcher says.
        rank: its number among all processes; None is what the environment says.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        forked: bool,
        to_files: bool = False,
        error_file: str | None = None,
        rank: int | None = None,
    ) -> None:
        self.function, self.forked, self.to_files = function, forked, to_files
        self.error_file, self.rank = error_file, rank
        self.__name__ = self.__qualname__ = name_of(function)

    def __call__(self, *args: Any) -> None:
        """Run the function; what it returns is dropped, as it would have to be sent home and need not be picklable.

        Args:
            args: of the function.
        """
        try:
            self._begin_afresh()
            self.function(*args)
        except SystemExit as end:
            if end.code in (None, 0):
                return
            if end.code != PREEMPTED:  # then it has saved itself, and has not failed
                self._leave(end)
            raise
        except BaseException as error:
            self._leave(error)
            # Any other exception would make torch write its own report over this one; and torch takes an interrupted process
            # for one that is done, and waits for its result for ever.
            raise SystemExit(_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1) from None
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(
                    Exception
                ):  # an error of the function must not be hidden by one of its output
                    stream.flush()

    def _leave(self, error: BaseException) -> None:
        record = failure.record(type(error), error, _users_part(error.__traceback__))
        if self.rank is not None:
            record["rank"] = self.rank
        with contextlib.suppress(OSError):  # a full disk must not hide the error itself
            failure.leave(self.error_file or os.environ[failure.ERROR_FILE], record)

    def _begin_afresh(self) -> None:
        from accelerate.state import AcceleratorState, GradientState

        _end_with_the_parent()
        if self.to_files:
            _write_into_files(os.path.dirname(os.environ[failure.ERROR_FILE]))
        else:
            write_whole_lines()
        if self.forked:
            os.environ["FORK_LAUNCHED"] = "1"
            _forget_handlers()
            # GNU OpenMP does not survive a fork: a parallel region would wait for threads that only the parent has.
            torch.set_num_threads(1)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def on_one_core(function: Callable[..., Any], index: int, *args: Any) -> None:
    """Run the function in this process, without the number that torch_xla gives it."""
    function(*args)


def tpu_rank(function: Callable[..., Any], directory: str, expected: int | None, index: int, *args: Any) -> None:
    """Run the function as rank `index`: in a process of torch_xla's, or in a thread of it on older TPUs."""

    def checked(*args: Any) -> None:
        runtime = importlib.import_module("torch_xla.runtime")
        found = runtime.local_process_count() * runtime.addressable_device_count()
        if expected not in (None, found):
            raise ValueError(
                f"num_processes is {expected}, and torch_xla runs {found} on this machine, one for each core. Leave num_processes "
                "out to use all, or give 1."
            )
        function(*args)

    Worker(checked, forked=True, error_file=os.path.join(directory, f"{index}.json"), rank=index)(*args)


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the launcher's own frames at its beginning."""
    rest = trace
    while rest is not None and os.path.dirname(rest.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
        rest = rest.tb_next
    return rest or trace


def _end_with_the_parent() -> None:
    """Let the system end this process when the one that started it is killed (Linux)."""
    request = getattr(torch.multiprocessing, "_prctl_pr_set_pdeathsig", None)
    if request is not None and hasattr(signal, "SIGTERM"):
        # Torch requests SIGINT, which waits for Python; a process inside a collective would stay, with its memory on the GPU.
        request(signal.SIGTERM)


def _forget_handlers() -> None:
    """Let signals do what they do in a fresh process: the launcher's handlers came along with the fork."""
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in _SIGNALS:
        number = getattr(signal, name, None)
        if number is not None and callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


# -- how the function reaches fresh processes ----------------------------------------------------------------------------


def sendable(request: Request) -> Request:
    """Return a request whose function fresh processes can receive: by its name if they can import it, else by value.

    Args:
        request: what the user asks for.

    Raises:
        CannotSendError: neither is possible; the message says why, and what to do.
    """
    function, args = request.function, tuple(request.args)
    obstacle = _why_not_by_name(function, args)
    if obstacle is None:
        return dataclasses.replace(request, args=args)
    name = name_of(function)
    if importlib.util.find_spec("cloudpickle") is None:
        raise CannotSendError(
            f"{name} cannot be sent to a fresh process ({obstacle}). Install cloudpickle (pip install cloudpickle), or put {name} "
            "into a .py file and import it from there."
        )
    try:
        return dataclasses.replace(request, function=ByValue(function, args), args=())
    except Exception as error:  # cloudpickle passes on whatever the objects raise
        raise CannotSendError(
            f"{name} cannot be sent to a fresh process: {type(error).__name__}: {error}.{_hindrance(function, args)} Build such "
            f"things inside {name}, or put it into a .py file and import it from there."
        ) from None


class ByValue:
    """A function and its arguments as bytes of cloudpickle, which includes what is defined in `__main__`.

    Args:
        function: the function.
        args: its arguments.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        import cloudpickle

        self.__name__ = name_of(function)
        self._bytes = cloudpickle.dumps((function, args))
        # The source of cells, for the lines of a traceback.
        self._cells = {
            name: entry
            for name, entry in linecache.cache.items()
            if len(entry) > _LINES and entry[_TIME] is None and not name.startswith("<frozen")
        }

    def __call__(self) -> None:
        """Call the function."""
        import cloudpickle

        linecache.cache.update(self._cells)
        function, args = cloudpickle.loads(self._bytes)
        function(*args)


class _Probe(pickle.Pickler):
    """Pickles without what torch and multiprocessing hand over in their own ways, which only work in earnest."""

    def persistent_id(self, value: Any) -> str | None:
        ours = isinstance(value, (torch.Tensor, torch.UntypedStorage))
        return "left out" if ours or type(value).__module__.startswith("multiprocessing.") else None


def _why_not_by_name(function: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    pickled = io.BytesIO()
    try:
        _Probe(pickled).dump((function, args))
    except Exception as error:  # pickling passes on whatever the objects raise
        return f"{type(error).__name__}: {error}"
    if not main_is_importable() and b"__main__" in pickled.getvalue():
        return "it is defined in a cell, or uses something that is"
    return None


def main_is_importable() -> bool:
    """Return whether a fresh process can import the main program: a script or a module, but no notebook and no console."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        return True
    path = getattr(main, "__file__", None)
    return path is not None and os.path.isfile(path) and "IPython" not in str(getattr(main, "__loader__", ""))


def _hindrance(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return a sentence about what could not be sent, or nothing."""
    import cloudpickle

    named = {f"args[{number}]": value for number, value in enumerate(args)}
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        named = {**named, **used.globals, **used.nonlocals}
    for name, value in named.items():
        try:
            cloudpickle.dumps(value)
        except Exception:  # as above
            return f" The reason is {name}, a {type(value).__name__}."
    return ""


# -- output --------------------------------------------------------------------------------------------------------------


class _Cell(io.RawIOBase):
    """A notebook's stream, for an `io.TextIOWrapper` that collects whole lines before it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data).decode(errors="surrogatepass"))
        return len(data)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


def write_whole_lines() -> None:
    """Let this process print whole lines where a notebook's stream or an unbuffered one sends each piece of a `print`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # PYTHONUNBUFFERED sets write_through.
        if stream is not None and (not isinstance(stream, io.TextIOWrapper) or stream.write_through):
            lines = io.TextIOWrapper(
                _Cell(stream), encoding="utf-8", errors="surrogatepass", newline="", line_buffering=True
            )
            setattr(sys, name, lines)


def _write_into_files(directory: str) -> None:
    for number, name in _OUTPUT.items():
        descriptor = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in _OUTPUT)  # noqa: SIM115


class WrittenByWorkers(DefaultLogsSpecs):
    """Files of output that the processes write by themselves, and torch only reads.

    Torch would redirect the descriptor of `sys.stdout`. In a notebook that is another one than 1, or there is none; and on macOS
    and Windows torch redirects nothing.
    """

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files, none of them for torch to redirect to.

        Args:
            envs: the variables of each process.
        """
        files = super().reify(envs)
        return dataclasses.replace(
            files, stdouts=dict.fromkeys(files.stdouts, ""), stderrs=dict.fromkeys(files.stderrs, "")
        )


# -- the agent -----------------------------------------------------------------------------------------------------------


class FunctionAgent(elastic.Agent):
    """The agent of processes that run a function and no program: torch keeps them in another place."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        before = set(multiprocessing.active_children())
        try:
            with resolvable_forks():
                started = super()._start_workers(worker_group)
        except BaseException:  # torch forgets the processes of a start that fails half-way
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
                process.join()
            raise
        # A rank that waits in a collective for one that is done would wait on. What that returns, None, outlives it in a pipe.
        self.let_finished_functions_end()
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        statuses, vanished = self.statuses, []
        if result.state == WorkerState.HEALTHY:
            # Processes that ended well before their function did (`os._exit(0)`): torch would wait for them for ever.
            vanished = [local for local, status in statuses.items() if status == 0 and not self.has_returned(local)]
        if not vanished and not result.failures:
            return result
        failures = {}
        by_itself = {*vanished, *(one.local_rank for one in result.failures.values())}
        for local, process in self.processes.items():
            if statuses[local] or local in vanished:
                one = ProcessFailure(local, process.pid, statuses[local], self.error_files[local])
                # Torch has stopped those that were alive at the agent's last look.
                one.seen = self._seen.get(local, Seen(time.time(), stopped=local not in by_itself))
                failures[worker_group.workers[local].global_rank] = one
        return RunResult(state=WorkerState.FAILED, failures=failures)


class MachineFunctionAgent(machine_rendezvous.MachineAgent, FunctionAgent):
    """The same on one of several machines."""


@contextlib.contextmanager
def resolvable_forks() -> Iterator[None]:
    """Let `os.fork` try again where the new process could not look up names.

    While processes are forked, other threads of this one serve those that are there already: torch's store looks up the name of
    each that connects. If such a thread holds the lock of glibc's resolver at that moment, no thread releases it in the new
    process, which hangs for ever when it connects to an address itself. glibc takes care of its other locks, and not of this one.

    Source: https://sourceware.org/git/?p=glibc.git;a=blob;f=resolv/resolv_conf.c
    """
    fork = getattr(os, "fork", None)
    # It takes the lock and releases it, without a query to any network.
    probe = getattr(ctypes.CDLL(None), "__res_init", None) if fork is not None else None
    if probe is None:
        yield
        return

    def fork_again() -> int:
        for _ in range(_FORKS):
            reader, writer = os.pipe()
            child = fork()
            if child == 0:
                os.fork = fork
                taker = threading.Thread(target=probe, daemon=True)
                taker.start()
                taker.join(_LOCK_S)
                if taker.is_alive():
                    os._exit(1)
                os.write(writer, b"1")
            os.close(writer)
            answer = child == 0 or os.read(reader, 1)
            os.close(reader)
            if answer:
                return child
            os.waitpid(child, 0)
        return fork()

    os.fork = fork_again
    try:
        yield
    finally:
        os.fork = fork
