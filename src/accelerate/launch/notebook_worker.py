"""Functions as ranks: what runs in each process, and torch's agent for such processes. Importing this module imports torch."""

import contextlib
import io
import multiprocessing
import os
import signal
import string
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch import elastic, machine_rendezvous
from accelerate.launch.errors import Seen
from accelerate.launch.notebook import name_of
from accelerate.runtime import failure

# A function of Python's does not run while the process waits inside torch, so these end a rank at once.
_SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_INTERRUPTED = 130


class Worker:
    """What a rank runs: the function, without what the process has inherited, and with a record of its failure.

    Args:
        function: the function.
        prefix: what stands before each line of its output, with `${rank}`, `${local_rank}` and `${role_name}`; or None.

    Attributes:
        may_run: all ranks are forked. Before that a rank must not connect to the launcher's store: a thread of the launcher
            would look up its name, and a process that is forked meanwhile inherits the locked lock of glibc's resolver.
    """

    def __init__(self, function: Callable[..., Any], prefix: str | None = None) -> None:
        self.function, self.prefix = function, prefix
        self.may_run = multiprocessing.get_context("fork").Event()
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
                _leave(end)
            raise
        except BaseException as error:
            _leave(error)
            # Any other exception would make torch write its own report over this one; and torch takes an interrupted process
            # for one that is done, and waits for its result for ever.
            raise SystemExit(_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1) from None
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(
                    Exception
                ):  # an error of the function must not be hidden by one of its output
                    stream.flush()

    def _begin_afresh(self) -> None:
        # Torch requests SIGINT, which waits for Python; a process inside a collective would stay, with its memory on the GPU.
        end_with_the_parent = getattr(torch.multiprocessing, "_prctl_pr_set_pdeathsig", lambda number: None)
        end_with_the_parent(signal.SIGTERM)
        # Signals do what they do in a fresh process: the launcher's handlers came along with the fork.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (getattr(signal, name) for name in _SIGNALS):
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
        names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "role_name": "ROLE_NAME"}
        values = {name: os.environ.get(variable) for name, variable in names.items()}
        write_whole_lines(string.Template(self.prefix or "").safe_substitute(values))
        # GNU OpenMP does not survive a fork: a parallel region would wait for threads that only the parent has.
        torch.set_num_threads(1)
        _forget_states()
        self.may_run.wait()


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


# -- output --------------------------------------------------------------------------------------------------------------


class _WholeLines:
    """Collects whole lines before a notebook's stream, which sends each piece of a `print`, and puts a prefix before each."""

    def __init__(self, stream: Any, prefix: str) -> None:
        self._stream, self._prefix, self._held = stream, prefix, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        lines, newline, self._held = (self._held + text).rpartition("\n")
        self._send(lines + newline)
        return len(text)

    def flush(self) -> None:
        held, self._held = self._held, ""
        self._send(held)
        self._stream.flush()

    def _send(self, text: str) -> None:
        if text:
            self._stream.write("".join(self._prefix + line for line in text.splitlines(keepends=True)))


def write_whole_lines(prefix: str = "") -> None:
    """Let this process print whole lines, each behind a prefix; a console's own streams are left alone without one."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # PYTHONUNBUFFERED sets write_through.
        if stream is not None and (prefix or not isinstance(stream, io.TextIOWrapper) or stream.write_through):
            setattr(sys, name, _WholeLines(stream, prefix))


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
