"""Several processes on one machine, under torch's elastic launcher, with an agent of our own. Importing this module imports torch.

Torch starts, watches and restarts the processes and collects their error files. The agent adds what torch's agent lacks: it
forwards signals and lets the processes save their run, lets all of them end when one ends as preempted, records which one failed
first, and ends what they started.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch.failures import Reporter, Seen, follows
from accelerate.launch.guard import Guard, end_groups
from accelerate.launch.plan import Rendezvous
from accelerate.runtime import failure

HOST = "127.0.0.1"
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
# Torch's log lines about failures and signals repeat what the reporter prints.
_QUIET = {
    "torch.distributed.elastic.multiprocessing.api": logging.CRITICAL,
    "torch.distributed.elastic.agent.server.api": logging.ERROR,
    "torch.multiprocessing.spawn": logging.ERROR,
}
_hangups_are_ignored = hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


class StoreRendezvous(StaticTCPRendezvous):
    """Torch's static rendezvous of one machine, at a port that the system may choose, and with a new store for each restart.

    The store listens before a process knows its port, so no other job takes the port in between; and a launch is a quarter of a
    second quicker than with torch's `c10d`.
    """

    _own_store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new store: restarted processes must not find the addresses of those before them."""
        # The previous store may still hold the port that the user chose.
        port = self.master_port if self._own_store is None else 0
        self._own_store = TCPStore(HOST, port, None, True, self.timeout, wait_for_workers=False, **without_libuv())
        store = PrefixStore(self.run_id, self._own_store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(HOST, self._own_store.port))


def without_libuv() -> dict[str, bool]:
    """Return the option of a store that disables libuv where torch has none: for Windows it is built without."""
    wanted = os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1")
    return {} if wanted == "1" else {"use_libuv": False}


class Agent(LocalElasticAgent):
    """Torch's agent for processes that save their run when a signal comes, and that leave their tracebacks to the launcher.

    Attributes:
        reporter: prints what happens; None for functions, whose failures the caller reports.
        guard: ends the processes if the launcher is killed.
    """

    reporter: Reporter | None = None
    guard: Guard | None = None
    _handled: tuple[int, ...] = ()
    _shutdown_timeout: float = 30  # older versions of torch have no such setting

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._home = os.getpid()
        self._received: dict[int, float] = {}
        self._forwarded: set[int] = set()
        self._joining = self._starting = self._gone = False
        self._stopping: int | None = None
        self._groups: list[int] = []
        self._seen: dict[int, Seen] = {}
        self._last_look = time.time()
        self._left_since: dict[int, float] = {}
        self._caused_since: float | None = None
        self._ending_since: float | None = None

    # -- starting ----------------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._joining = True
        try:
            for number in self._received:  # it came while the processes of the last attempt were ended
                raise stopped_by(number)
            super()._rendezvous(worker_group)
        finally:
            self._joining = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # A handler that raises while torch starts processes would make torch forget those that it has started.
        self._starting, self._seen, self._left_since, self._caused_since = True, {}, {}, None
        try:
            started = super()._start_workers(worker_group)
            self._gone, self._last_look = False, time.time()
            if self.reporter is not None:
                self._groups = list(started.values()) if hasattr(os, "killpg") else []
                self.guard.watch(self._groups)
                self.reporter.started(*self._attempt(), self._log_folder())
        finally:
            self._starting = False
            self._install_handlers()  # older versions of torch put their own handlers there
        for number in self._received:
            if number in STOPPING:
                self._stop(number)
        return started

    def _attempt(self) -> tuple[int, int]:
        restarts = self.get_worker_group().spec.max_restarts
        return restarts - self._remaining_restarts + 1, restarts + 1

    def _log_folder(self) -> str | None:
        paths = [path for path in (*self._pcontext.stdouts.values(), *self._pcontext.stderrs.values()) if path]
        return os.path.dirname(os.path.dirname(paths[0])) if paths else None

    # -- signals -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle signals; at the end put the former handlers back. In the main thread alone, as Python demands."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.getsignal(number) for number in (*FORWARDED, *STOPPING)}
        self._handled = tuple(former)
        self._install_handlers()
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _install_handlers(self) -> None:
        for number in self._handled:
            # `nohup` means that the run goes on when the terminal is closed.
            ignored = number not in (*FORWARDED, signal.SIGINT) and _hangups_are_ignored
            signal.signal(number, signal.SIG_IGN if ignored else self._on_signal)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        if os.getpid() != self._home:  # a forked worker inherits this handler
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        now = time.monotonic()
        first = self._received.setdefault(number, now)
        if self._starting:
            return
        if self._joining:
            raise stopped_by(number)
        if number in STOPPING:
            self._stop(number)
        elif now - first >= _REPEAT_S:
            raise stopped_by(number)
        else:
            self._forward()

    def _stop(self, number: int) -> None:
        """End the run: torch ends the processes when this raises. The second time, kill them."""
        if self._stopping is not None:
            self._kill()
            return
        self._stopping = number
        if self.reporter is not None:
            self.reporter.stopping(number, self._shutdown_timeout)
        raise stopped_by(number)

    def _kill(self) -> None:
        for handler in getattr(self._pcontext, "subprocess_handlers", {}).values():
            with contextlib.suppress(OSError):
                if self._groups:
                    os.killpg(handler.proc.pid, signal.SIGKILL)
                else:
                    handler.proc.kill()

    def _forward(self) -> None:
        """Send each signal that came to the processes, once."""
        if self._pcontext is None or self._gone:
            return
        statuses = self._statuses()
        # The id of a process that is gone may belong to another program by now.
        alive = [pid for local, pid in self._pcontext.pids().items() if statuses.get(local) is None]
        for number in set(self._received) - self._forwarded - set(STOPPING) if statuses else ():
            self._forwarded.add(number)
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    # -- watching ----------------------------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._forward()  # what came while the processes were being started
        statuses = self._look()
        if self._forwarded or PREEMPTED in statuses.values():
            self._remaining_restarts = 0
        if self._is_ending(statuses) or self._waits_for_cause(statuses):
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        for number in self._forwarded:
            if any(failed.exitcode == -number for failed in result.failures.values()):
                # The processes have no handler for it and are gone; their descendants get it, too.
                for pid in self._pcontext.pids().values():
                    with contextlib.suppress(OSError):
                        os.killpg(pid, number)
                raise stopped_by(number)
        if result.failures and self.reporter is not None:
            self._report(result)
        return result

    def _statuses(self) -> dict[int, int | None]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local: handler.proc.poll() for local, handler in handlers.items()}

    def _look(self) -> dict[int, int | None]:
        """Note which processes have ended and when, and show the traceback of one that has failed and does not end."""
        now, statuses = time.time(), self._statuses()
        for local, status in statuses.items():
            if status and local not in self._seen:
                # A process that is killed is the cause as a rule, so its time is the earliest possible one; an abort follows.
                killed = status < 0 and status != -signal.SIGABRT
                self._seen[local] = Seen(self._last_look if killed else now)
            elif status is None and self.reporter is not None and os.path.exists(self._pcontext.error_files[local]):
                since = self._left_since.setdefault(local, time.monotonic())
                record = _read(self._pcontext.error_files[local])
                if time.monotonic() - since > _LINGERING_S and record and not record.get("interrupt"):
                    self.reporter.lingers(record.get("rank", local), record)
        self._last_look = now
        return statuses

    def _report(self, result: RunResult) -> None:
        for ended in result.failures.values():
            # Torch has stopped those that were alive at the last look.
            seen = self._seen.get(ended.local_rank, Seen(time.time(), stopped=True))
            fault = _text(failure.fault_file(self._pcontext.error_files[ended.local_rank]))
            ended.seen = Seen(seen.time, seen.stopped, fault)
        self._complete_logs()
        attempt, attempts = self._attempt()
        self.reporter.failed(result.failures, attempt, attempts if self._remaining_restarts else attempt)

    def _complete_logs(self) -> None:
        """Append tracebacks that were left to the launcher to the output files of their processes."""
        for local, path in self._pcontext.stderrs.items():
            record = _read(self._pcontext.error_files[local])
            if path and record and not record.get("shown"):
                with (
                    contextlib.suppress(OSError),
                    open(path, "a", encoding="utf-8", errors="backslashreplace") as file,
                ):
                    file.write(record["traceback"])

    def _is_ending(self, statuses: Mapping[int, int | None]) -> bool:
        """Whether some processes have ended as preempted, and the others have time left to do so."""
        ended = set(statuses.values())
        if PREEMPTED not in ended or None not in ended or not ended <= {PREEMPTED, 0, None}:
            return False
        self._ending_since = self._ending_since or time.monotonic()
        return time.monotonic() - self._ending_since < ENDING_S

    def _waits_for_cause(self, statuses: Mapping[int, int | None]) -> bool:
        """Whether all that failed lost a connection, and the process which closed it has time left to end."""
        failed = [local for local, status in statuses.items() if status]
        if not failed or self._forwarded or None not in statuses.values():
            return False
        records = [_read(path) for path in self._pcontext.error_files.values()]
        if any(not records[local] for local in failed) or any(record and not follows(record) for record in records):
            return False
        self._caused_since = self._caused_since or time.monotonic()
        return time.monotonic() - self._caused_since < _CAUSE_S

    # -- ending ------------------------------------------------------------------------------------------------------

    def _stop_workers(self, *args: Any, **kwargs: Any) -> None:
        super()._stop_workers(*args, **kwargs)
        self._gone = True
        self._sweep()

    def _sweep(self) -> None:
        """End the descendants of processes that have failed or were stopped."""
        groups, self._groups = self._groups, []
        killed = self._stopping and -getattr(signal, "SIGKILL", 9) in self._statuses().values()
        end_groups(groups, 0.0 if killed else _ORPHANS_S)

    def close(self, failed: bool) -> None:
        """End what is left of a failed run, report where an interrupted one stood, and remove empty files."""
        if failed:
            self._sweep()
        if self.guard is not None:
            self.guard.close()
        if self._pcontext is None or self.reporter is None:
            return
        if self._stopping == signal.SIGINT:
            records = [_read(path) for path in self._pcontext.error_files.values()]
            self.reporter.interrupted({record["rank"]: record for record in records if record})
            self._complete_logs()
        for path in map(failure.fault_file, self._pcontext.error_files.values()):
            with contextlib.suppress(OSError):
                if os.path.getsize(path) == 0:
                    os.remove(path)


def stopped_by(number: int) -> SignalException:
    """Return the exception with which torch's agent ends a run after a signal."""
    return SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))


def _read(path: str) -> Mapping[str, Any] | None:
    """Return our part of an error file, or None."""
    try:
        record = json.loads(_text(path)).get(failure.OURS)
    except (ValueError, AttributeError):
        return None
    return record if isinstance(record, dict) else None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


# -- a run -----------------------------------------------------------------------------------------------------------


def make_config(
    num_processes: int,
    rendezvous: Rendezvous | RendezvousHandler,
    log_dir: str,
    tee: Mapping[int, int] | None = None,
    **rest: Any,
) -> LaunchConfig:
    """Return the settings of torch's elastic launcher for the processes of this machine.

    Args:
        num_processes: how many processes to start.
        rendezvous: the settings for one machine, or the rendezvous of several.
        log_dir: directory of the error files, and of the output if `tee` asks for it.
        tee: which streams to copy into files, as `accelerate.launch.logs.streams` returns them.
        rest: further fields of `torch.distributed.launcher.api.LaunchConfig`.
    """
    backend, endpoint, settings = "static", HOST, {"handler": rendezvous}
    if isinstance(rendezvous, Rendezvous):
        backend, endpoint = rendezvous.backend, rendezvous.endpoint
        settings = {**without_libuv(), **rendezvous.settings}
    if isinstance(rendezvous, Rendezvous) and backend == "static":
        timeout = float(settings.get("timeout", 600))
        settings["handler"] = StoreRendezvous(HOST, rendezvous.port, 0, 1, f"accelerate-{os.getpid()}", timeout)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"accelerate-{os.getpid()}",
        rdzv_endpoint=endpoint,
        rdzv_backend=backend,
        rdzv_configs=settings,
        # The name of this machine may not be resolvable, least of all in a container.
        local_addr=HOST,
        logs_specs=DefaultLogsSpecs(log_dir, tee={rank: Std(value) for rank, value in (tee or {}).items()}),
        **own_signals(),
        **rest,
    )


def own_signals() -> dict[str, str]:
    """Return the setting that keeps torch's hands off the signals that the agent handles; older versions have none."""
    if "signals_to_handle" not in LaunchConfig.__dataclass_fields__:
        return {}
    # Torch wants at least one. No user sends these two by accident.
    return {"signals_to_handle": "SIGQUIT" if hasattr(signal, "SIGQUIT") else "SIGBREAK"}


def start(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
    verbose: bool = False,
    agent: type[Agent] = Agent,
    reporter: Reporter | None = None,
) -> dict[int, Any]:
    """Start processes and wait for all of them. A failed one stops the others, and so does a signal; none stays behind.

    Args:
        config: what `make_config` returned.
        entrypoint: a program, or a function.
        arguments: its arguments.
        environment: all variables of the processes.
        verbose: let torch log failures in its own words.
        agent: the class of the agent.
        reporter: prints what happens to the processes of a program; everything by default.

    Returns:
        What a function returned, by rank.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a process failed.
        torch.distributed.elastic.multiprocessing.api.SignalException: a signal stopped them.
    """
    environment = {**environment, "TORCHELASTIC_SIGNALS_TO_HANDLE": "".join(own_signals().values())}
    runs_program = isinstance(entrypoint, str)
    if runs_program:
        # The processes leave their tracebacks to the launcher.
        environment[failure.LAUNCHER] = str(os.getpid())
        if sys.platform == "win32":
            environment.setdefault("USE_LIBUV", "0")
    with _variables(environment), _quiet_torch(verbose):
        watcher = _build(agent, config, entrypoint, arguments)
        if runs_program:
            watcher.reporter, watcher.guard = reporter or Reporter(), Guard(watcher._shutdown_timeout)
        result = _watch(watcher)
    if result.is_failed():
        raise ChildFailedError(entrypoint if runs_program else entrypoint.__name__, result.failures)
    return result.return_values


def _build(
    agent: type[Agent], config: LaunchConfig, entrypoint: Callable[..., Any] | str, arguments: tuple[Any, ...]
) -> Agent:
    """Return the agent that torch's launcher would build; that one takes no other class than its own."""
    handler = config.rdzv_configs.get("handler")
    if handler is None:
        nodes = (config.min_nodes, config.max_nodes, config.local_addr)
        handler = rendezvous_handler_registry.create_handler(
            RendezvousParameters(
                config.rdzv_backend, config.rdzv_endpoint, config.run_id, *nodes, **config.rdzv_configs
            )
        )
    shared = {field.name for field in dataclasses.fields(WorkerSpec)}.intersection(vars(config))
    spec = WorkerSpec(
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=arguments,
        rdzv_handler=handler,
        **{name: getattr(config, name) for name in shared},
    )
    settings = {"start_method": config.start_method, "log_line_prefix_template": config.log_line_prefix_template}
    if hasattr(config, "shutdown_timeout"):  # not in older versions of torch
        settings["shutdown_timeout"] = config.shutdown_timeout
    return agent(spec, config.logs_specs, **settings)


def _watch(agent: Agent) -> RunResult:
    """Run the agent to its end, and leave nothing behind."""
    finished = stopped = False
    with agent.handling_signals():
        try:
            result = agent.run()
            finished = True
            return result
        except SignalException:
            stopped = True
            raise
        finally:
            agent.close(failed=not finished)
            if not stopped:  # torch's handler would end the run on all machines
                agent.get_worker_group().spec.rdzv_handler.shutdown()


@contextlib.contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Replace the variables of this process, which torch's agent hands on to those that it starts."""
    before = dict(os.environ)
    try:
        _assign(wanted)
        yield
    finally:
        _assign(before)


def _assign(wanted: Mapping[str, str]) -> None:
    for name in set(os.environ).difference(wanted):
        del os.environ[name]
    os.environ.update(wanted)


@contextlib.contextmanager
def _quiet_torch(verbose: bool) -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in _QUIET}
    if not verbose:
        for name, level in _QUIET.items():
            logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
