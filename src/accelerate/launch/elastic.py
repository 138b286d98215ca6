"""Several processes on one machine, under torch's elastic launcher, with an agent of our own. Importing this module imports torch.

Torch starts, watches and restarts the processes and collects their error files. The agent adds what torch's agent lacks: it
forwards signals and lets the processes save their run, lets all of them end when one ends as preempted, records which one failed
first, and ends what they started.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

import contextlib
import io
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from accelerate.base.environment import clear_environment
from accelerate.launch.errors import LaunchError, Reporter, follows
from accelerate.launch.guard import Guard, bound, end_groups
from accelerate.launch.plan import LaunchPlan, Rendezvous, Source
from accelerate.launch.torch_compat import OpenAgent
from accelerate.runtime import failure
from accelerate.runtime.failure import PREEMPTED
from accelerate.runtime.rendezvous import LOOPBACK, serve_this_machine, uses_libuv

# Signals that are forwarded to the processes, which may need time to save their run. Schedulers send these.
FORWARDED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))
# Signals that end the run. The same signal once more kills what is left.
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name))
# A scheduler may send a signal to all processes of a job more than once in short order; that is one request.
_REPEAT_S = 5.0
# How long the other processes have to end by themselves when one has ended as preempted.
ENDING_S = 300.0
# How long a process may take to end after it has left its traceback; then the traceback is shown.
_LINGERING_S = 5.0
# How long to wait for the first failure where all failures so far are lost connections: a process that exits closes its
# connections some time before it ends.
_CAUSE_S = 2.0
# How long the descendants of failed processes have to end.
_ORPHANS_S = 3.0
# A longer pause between two looks would outlast any patience, and the length of a sleep is limited, too.
_LONGEST_S = 3600.0
# Torch wants a signal to handle, and the agent handles the others. No user sends these two by accident.
_SIGNAL_OF_TORCH = "SIGQUIT" if hasattr(signal, "SIGQUIT") else "SIGBREAK"
# Torch's log lines about failures and signals repeat what the reporter prints.
_QUIET = {
    "torch.distributed.elastic.multiprocessing.api": logging.CRITICAL,
    "torch.distributed.elastic.agent.server.api": logging.ERROR,
    "torch.multiprocessing.spawn": logging.ERROR,
}
_hangups_are_ignored = hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


# -- options -----------------------------------------------------------------------------------------------------------


def streams(plan: LaunchPlan) -> dict[int, Std]:
    """Check the options about watching; return the streams of each local rank that `--tee` copies into files."""
    interval, tee = plan.settings["monitor_interval"], plan.settings["tee"]
    if not 0 < interval.value <= _LONGEST_S:  # not a number is not in between either
        raise LaunchError(f"--monitor_interval is {interval.value}; give seconds, above 0 and up to {_LONGEST_S:g}.")
    text = "3" if plan["log_dir"] is not None and tee.source is Source.DEFAULT else str(tee.value)
    try:
        chosen = Std.from_str(text)
    except ValueError:
        how = "0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or each by local rank: 0:3,1:2"
        raise LaunchError(f"--tee is {text!r}. Write {how}.") from None
    return chosen if isinstance(chosen, dict) else dict.fromkeys(range(plan.local_processes), chosen)


@contextlib.contextmanager
def directory(given: str | None) -> Iterator[str]:
    """Yield the user's directory for the files of a run (a LaunchError if it cannot be used), or a temporary one."""
    if given is None:
        with tempfile.TemporaryDirectory(prefix="accelerate_launch_", ignore_cleanup_errors=True) as made:
            yield made
        return
    try:
        os.makedirs(given, exist_ok=True)
        tempfile.TemporaryFile(dir=given).close()
    except OSError as error:
        raise LaunchError(f"--log_dir is {given!r}, which cannot be used: {error.strerror}.") from None
    yield given


# -- the agent ---------------------------------------------------------------------------------------------------------


class StoreRendezvous(StaticTCPRendezvous):
    """Torch's static rendezvous of one machine, at a port the system may choose, with a new store for each restart.

    The store listens before a process knows its port, so no other job takes it; and a launch is quicker than with
    torch's `c10d`.
    """

    _own_store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new store: restarted processes must not find the addresses of those before them."""
        # The previous store may still hold the port that the user chose.
        port = self.master_port if self._own_store is None else 0
        self._own_store = serve_this_machine(port, self.timeout)
        address = RendezvousStoreInfo(LOOPBACK, self._own_store.port)
        return RendezvousInfo(PrefixStore(self.run_id, self._own_store), 0, 1, address)


class Agent(OpenAgent):
    """Torch's agent for processes that save their run when a signal comes, and leave their tracebacks to the launcher.

    `reporter` prints what happens, None for functions; `guard` ends the processes if the launcher is killed.
    """

    reporter: Reporter | None = None
    guard: Guard | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._home = os.getpid()
        self._received: dict[int, float] = {}
        self._handled: list[int] = []
        self._forwarded: set[int] = set()
        self._phase, self._gone = "joining", False
        self._stopping: int | None = None
        self._groups: list[int] = []
        self._died: dict[int, float] = {}
        self._since: dict[str, float] = {}

    # -- starting ----------------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._phase = "joining"
        for number in self._received:  # it came while the processes of the last attempt were ended
            raise stopped_by(number)
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # A handler that raises while torch starts processes would make torch forget those that it has started.
        self._phase, self._died, self._since = "starting", {}, {}
        try:
            started = super()._start_workers(worker_group)
            self._install_handlers()  # torch before TORCHELASTIC_SIGNALS_TO_HANDLE puts its own there
            self._gone = False
            if self.reporter is not None:
                self._groups = list(started.values()) if hasattr(os, "killpg") else []
                self.guard.watch(self._groups)
                self.reporter.started(*self._attempt())
        finally:
            self._phase = "running"
        for number in set(self._received).intersection(STOPPING):
            self._stop(number)
        return started

    def _attempt(self) -> tuple[int, int]:
        restarts = self.get_worker_group().spec.max_restarts
        return restarts - self.restarts_left + 1, restarts + 1

    # -- signals -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle signals; at the end put the former handlers back. In the main thread alone, as Python demands."""
        former = {}
        if threading.current_thread() is threading.main_thread():
            former = {number: signal.getsignal(number) for number in (*FORWARDED, *STOPPING)}
        self._handled = list(former)
        self._install_handlers()
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _install_handlers(self) -> None:
        for number in self._handled:
            # `nohup` means that the run continues when the terminal is closed.
            ignored = number not in (*FORWARDED, signal.SIGINT) and _hangups_are_ignored
            signal.signal(number, signal.SIG_IGN if ignored else self._on_signal)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        if os.getpid() != self._home:  # a forked worker inherits this handler
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        now = time.monotonic()
        first = self._received.setdefault(number, now)
        if self._phase == "starting":
            return
        if self._phase == "running" and number in STOPPING:
            self._stop(number)
        elif self._phase == "running" and now - first < _REPEAT_S:
            self._forward()
        else:
            raise stopped_by(number)

    def _stop(self, number: int) -> None:
        """End the run: torch ends the processes when this raises. The second time, kill them."""
        if self._stopping is not None:
            for process in self.processes.values():
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL) if self._groups else process.kill()
            return
        self._stopping = number
        if self.reporter is not None:
            self.reporter.stopping(number, self.shutdown_timeout)
        raise stopped_by(number)

    def _forward(self) -> None:
        """Send each signal that came to the processes, once."""
        # The id of a process that is gone may belong to another program by now.
        alive = [local for local, status in self.statuses.items() if status is None and not self._gone]
        for number in set(self._received) - self._forwarded - set(STOPPING) if alive else ():
            self._forwarded.add(number)
            for local in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.processes[local].pid, number)

    # -- watching ----------------------------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._forward()  # what came while the processes were being started
        statuses = self.statuses
        for local, status in statuses.items():
            if status:
                self._died.setdefault(local, time.time())
            elif status is None and self.reporter is not None:
                self._show_if_it_lingers(local)
        # Torch looks again, and would stop all for one that has ended in between as preempted. It has to look for functions.
        all_run = None in statuses.values() and not any(statuses.values())
        if all_run and isinstance(worker_group.spec.entrypoint, str):
            return RunResult(state=WorkerState.HEALTHY)
        if self._is_ending(statuses) or self._waits_for_cause(statuses):
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        statuses = self.statuses if result.failures else {}
        for local in (local for local, status in statuses.items() if status):
            # Up to 2.9, torch omits those that it has stopped, or that have ended meanwhile.
            found = ProcessFailure(local, self.processes[local].pid, statuses[local], self.error_files[local])
            found.died = self._died.get(local)
            result.failures.setdefault(worker_group.workers[local].global_rank, found)
        # Asked of what torch saw: a process may have ended between the two looks.
        if self._forwarded or PREEMPTED in (failed.exitcode for failed in result.failures.values()):
            self.restarts_left = 0
        for number in self._forwarded.intersection(-failed.exitcode for failed in result.failures.values()):
            raise stopped_by(number)  # the processes have no handler for it
        if result.failures and self.reporter is not None:
            self._report(result)
        return result

    def _show_if_it_lingers(self, local: int) -> None:
        """Show the traceback of a process that has failed and does not end."""
        record = _read(self.error_files[local])
        if record and not record.get("interrupt") and not self._within(f"lingers {local}", _LINGERING_S):
            self.reporter.lingers(record.get("rank", local), record)

    def _report(self, result: RunResult) -> None:
        for ended in result.failures.values():
            ended.died = self._died.get(ended.local_rank)  # torch has stopped those that were alive at the last look
            ended.fault = _text(failure.beside(self.error_files[ended.local_rank], failure.FAULTS))
        self._complete_logs()
        attempt, attempts = self._attempt()
        self.reporter.failed(result.failures, attempt, attempts if self.restarts_left else attempt)
        if failure.HUNG not in (ended.exitcode for ended in result.failures.values()):
            for path in self.error_files.values():
                if report := _text(failure.beside(path, failure.HANG)):
                    self.reporter.tell("before that some ranks waited:", *report.splitlines())

    def _complete_logs(self) -> None:
        """Append tracebacks that were left to the launcher to the output files of their processes."""
        for local, path in self.stderr_files.items():
            record = _read(self.error_files[local])
            if path and record and not record.get("shown"):
                with contextlib.suppress(OSError), open(path, "a", encoding="utf-8", errors="replace") as file:
                    file.write(record["traceback"])

    def _is_ending(self, statuses: Mapping[int, int | None]) -> bool:
        """Whether some processes have ended as preempted, and the others have time left to do so."""
        ending = {PREEMPTED, None} <= set(statuses.values()) <= {PREEMPTED, 0, None}
        return ending and self._within("ending", ENDING_S)

    def _waits_for_cause(self, statuses: Mapping[int, int | None]) -> bool:
        """Whether all that failed lost a connection, and the process which closed it has time left to end."""
        if not any(statuses.values()) or None not in statuses.values() or self._forwarded:
            return False
        records = {local: _read(path) for local, path in self.error_files.items()}
        known = all(records[local] for local, status in statuses.items() if status)
        lost = all(follows(record) for record in records.values() if record)
        return known and lost and self._within("cause", _CAUSE_S)

    def _within(self, state: str, limit: float) -> bool:
        """Whether the processes have been in a state for less than a limit."""
        now = time.monotonic()
        return now - self._since.setdefault(state, now) < limit

    # -- ending ------------------------------------------------------------------------------------------------------

    def _stop_workers(self, *args: Any, **kwargs: Any) -> None:
        super()._stop_workers(*args, **kwargs)
        self._gone = True
        self.sweep()

    def sweep(self) -> None:
        """End the descendants of processes that have failed or were stopped."""
        groups, self._groups = self._groups, []
        killed = self._stopping and -getattr(signal, "SIGKILL", 9) in self.statuses.values()
        end_groups(groups, 0.0 if killed else _ORPHANS_S)


def stopped_by(number: int) -> SignalException:
    """Return the exception with which torch's agent ends a run after a signal."""
    return SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))


def _read(path: str) -> Mapping[str, Any] | None:
    """Return our part of an error file, or None."""
    with contextlib.suppress(ValueError, AttributeError):
        return json.loads(_text(path)).get(failure.OURS)
    return None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


# -- a run -------------------------------------------------------------------------------------------------------------


def start(
    entrypoint: Callable[..., Any] | str,
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
    processes: int,
    rendezvous: Rendezvous | RendezvousHandler,
    log_dir: str,
    tee: Mapping[int, Std] | None = None,
    agent: type[Agent] = Agent,
    reporter: Reporter | None = None,
    verbose: bool = False,
    run_id: str = "",
    start_method: str = "spawn",
    **settings: Any,
) -> None:
    """Start processes and wait for all of them; a failed one, or a signal, stops the others, and none stays behind.

    `environment` holds all their variables; `log_dir` holds error files, and the output that `tee` copies; `settings`
    are fields of torch's WorkerSpec; `verbose` lets torch log failures in its own words. Raises torch's
    ChildFailedError or SignalException.
    """
    if isinstance(rendezvous, Rendezvous):
        name, timeout = run_id or f"accelerate-{os.getpid()}", float(rendezvous.settings.get("timeout", 600))
        rendezvous = StoreRendezvous(LOOPBACK, rendezvous.port, 0, 1, name, timeout)
    else:
        environment = {**rendezvous.variables, **environment}
    if isinstance(entrypoint, str):
        entrypoint, *arguments = bound([entrypoint, *arguments])
    # Torch's launcher would build its own agent, and look for GPUs, after which processes could not be forked.
    shared = {"entrypoint": entrypoint, "args": tuple(arguments), "local_world_size": processes}
    spec = WorkerSpec(**{"role": "default_role", "rdzv_handler": rendezvous, **shared, **settings})
    watcher = agent(spec, DefaultLogsSpecs(log_dir, tee=dict(tee or {})), start_method=start_method)
    environment = {**environment, "TORCHELASTIC_SIGNALS_TO_HANDLE": _SIGNAL_OF_TORCH}
    if isinstance(entrypoint, str):
        environment[failure.LAUNCHER] = str(os.getpid())  # the processes leave their tracebacks to the launcher
        watcher.reporter, watcher.guard = reporter or Reporter(), Guard(watcher.shutdown_timeout)
        if not uses_libuv():
            environment["USE_LIBUV"] = "0"
        if isinstance(sys.stdout, io.TextIOWrapper):  # torch copies the lines of the processes to it
            sys.stdout.reconfigure(line_buffering=True)
    for name, level in _QUIET.items() if not verbose else ():
        logging.getLogger(name).setLevel(level)
    with clear_environment(), watcher.handling_signals():
        os.environ.update(environment)  # torch's agent hands them on to the processes that it starts
        try:
            result = watcher.run()
        except BaseException:
            watcher.sweep()
            raise
        finally:
            if watcher.guard is not None:
                watcher.guard.close()
            for path in watcher.error_files.values():
                for empty in (failure.beside(path, failure.FAULTS), failure.beside(path, failure.STACKS)):
                    with contextlib.suppress(OSError):
                        if os.path.getsize(empty) == 0:
                            os.remove(empty)
    if result.is_failed():
        raise ChildFailedError(spec.get_entrypoint_name(), result.failures)
