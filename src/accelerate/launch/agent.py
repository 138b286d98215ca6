"""Torch's agent, which starts and watches the processes of this machine, as we want it. Importing this module imports torch."""

import contextlib
import json
import os
import signal
import threading
import time
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.launcher import api

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch.guard import Guard, end_groups
from accelerate.launch.runners.failures import Reporter, Seen, follows
from accelerate.runtime import failure

# Signals that are passed on to the processes, which may want time to save their run. Schedulers send these.
FORWARDED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))
# Signals that end the run. The same once more kills what is left.
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name))
# A scheduler may send a signal to all processes of a job more than once in short order; that is one request.
_REPEAT_S = 5.0
# How long the others have for their own ending when one process has ended as preempted.
ENDING_S = 300.0
# How long a process may take to end after it has left its traceback; it is shown then, whatever becomes of the process.
_LINGERING_S = 5.0
# How long to wait for the process that went first, where those seen to have failed did so because somebody had gone: one that
# leaves with a status closes its connections some time before it ends.
_CAUSE_S = 2.0
# How long what failed processes have started may take to end.
_ORPHANS_S = 3.0


@dataclass
class Run:
    """What a run needs beside torch's configuration.

    Attributes:
        reporter: hears what happens; None for functions, whose failures the caller reports.
        guard: ends the processes if the launcher is killed.
    """

    reporter: Reporter | None = None
    guard: Guard | None = None


class Agent(LocalElasticAgent):
    """Torch's agent for processes that save their run when a signal comes.

    It passes the signal on and waits, where torch kills them after half a minute; and it lets all of them end by themselves when
    one ends as preempted, and does not start them again. It sees who failed by itself and who was stopped, and leaves nothing
    behind of what failed processes had started.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._received: dict[int, float] = {}
        self._forwarded: set[int] = set()
        self._ending_since: float | None = None
        self._run = _runs[-1] if _runs else Run()
        self._groups: list[int] = []
        self._starting, self._stopping, self._awaited = False, 0, 0
        self._seen: dict[int, Seen] = {}
        self._gone = False
        self._last_look = time.time()
        self._left_since: dict[int, float] = {}
        self._caused_since: float | None = None
        _agents.append(self)

    # -- starting ----------------------------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # A handler that raises while torch starts processes would make it forget those that it has started.
        self._starting, self._seen, self._left_since, self._caused_since = True, {}, {}, None
        try:
            started = super()._start_workers(worker_group)
            self._gone = False
        finally:
            self._starting = False
            _install()  # older versions of torch put their own handlers there
        self._last_look = time.time()
        if isinstance(worker_group.spec.entrypoint, str):
            self._groups = self._processes() if hasattr(os, "killpg") else []
            if self._run.guard is not None:
                self._run.guard.watch(self._groups)
            self._note_who_is_stopped()
            if self._run.reporter is not None:
                self._run.reporter.started(*self._attempt(worker_group), self._log_folder())
        if self._awaited:
            self._raise_stop(self._awaited)
        return started

    def _attempt(self, worker_group: WorkerGroup) -> tuple[int, int]:
        restarts = worker_group.spec.max_restarts
        return restarts - self._remaining_restarts + 1, restarts + 1

    def _log_folder(self) -> str | None:
        paths = [path for path in (*self._pcontext.stdouts.values(), *self._pcontext.stderrs.values()) if path]
        return os.path.dirname(os.path.dirname(paths[0])) if paths else None

    def _note_who_is_stopped(self) -> None:
        """Look at the processes just before torch stops those that are alive."""
        context, close = self._pcontext, self._pcontext._close

        def closing(*args: Any, **kwargs: Any) -> None:
            self._look()
            for local, status in self._statuses().items():
                if status is None and local not in self._seen:
                    self._seen[local] = Seen(time.time(), stopped=True)
            close(*args, **kwargs)

        context._close = closing

    # -- signals -----------------------------------------------------------------------------------------------------

    def forward(self, number: int) -> None:
        """Pass a signal on to the processes; sent once more after some seconds, stop them as torch does.

        Args:
            number: the signal.

        Raises:
            SignalException: it was sent once more; the agent stops the processes then.
        """
        now = time.monotonic()
        if now - self._received.setdefault(number, now) >= _REPEAT_S:
            raise SignalException(f"got {signal.Signals(number).name} again", sigval=signal.Signals(number))
        if not self._starting:
            self._pass_on()

    def stop(self, number: int) -> None:
        """End the run because of a signal: the processes and what they have started get it, and have some time.

        A second one kills them.

        Args:
            number: the signal.

        Raises:
            SignalException: torch's launcher ends the processes then.
        """
        if self._stopping:
            self._kill()
        elif self._starting:
            self._awaited = number
        else:
            self._raise_stop(number)

    def _raise_stop(self, number: int) -> None:
        self._stopping, self._awaited = number, 0
        if self._run.reporter is not None:
            self._run.reporter.stopping(number, self._shutdown_timeout)
        raise SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))

    def _kill(self) -> None:
        for group in self._groups:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        handlers = getattr(self._pcontext, "subprocess_handlers", None) or {}
        for handler in () if self._groups else handlers.values():
            handler.proc.kill()

    def _pass_on(self) -> None:
        for number in list(self._received) if self._processes() and not self._gone else ():
            if number not in self._forwarded:
                self._forwarded.add(number)
                for process in self._living():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)

    def _living(self) -> list[int]:
        # The number of a process that is gone may be somebody else's by now.
        statuses = self._statuses()
        pids = {} if self._pcontext is None else self._pcontext.pids()
        return [pid for local, pid in pids.items() if statuses.get(local) is None]

    def _processes(self) -> list[int]:
        return [] if self._pcontext is None else list(self._pcontext.pids().values())

    # -- watching ----------------------------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._pass_on()  # what came while the processes were being started
        if self._forwarded or self._preempted():
            self._remaining_restarts = 0
        self._look()
        if self._is_ending() or self._waits_for_cause():
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        for number in self._forwarded:
            if any(failure.exitcode == -number for failure in result.failures.values()):
                # They did not want it, and are gone; what they had started should go, too.
                for process in self._processes():
                    with contextlib.suppress(OSError):
                        os.killpg(process, number)
                raise SignalException("the processes were stopped", sigval=signal.Signals(number))
        if result.failures and self._run.reporter is not None:
            self._tell(worker_group, result)
        return result

    def _statuses(self) -> dict[int, int | None]:
        handlers = getattr(self._pcontext, "subprocess_handlers", None) or {}
        return {local: handler.proc.poll() for local, handler in handlers.items()}

    def _look(self) -> None:
        """Note when processes end, and show the traceback of one that has failed and does not end."""
        now = time.time()
        for local, status in self._statuses().items():
            if status and local not in self._seen:
                # Who is killed is a cause as a rule, so its time is the earliest that it can be.
                self._seen[local] = Seen(self._last_look if status < 0 else now)
            elif status is None and self._run.reporter is not None and local not in self._seen:
                self._look_for_traceback(local)
        self._last_look = now

    def _look_for_traceback(self, local: int) -> None:
        path = self._pcontext.error_files[local]
        if os.path.exists(path) and (
            time.monotonic() - self._left_since.setdefault(local, time.monotonic()) > _LINGERING_S
        ):
            told = _read(path)
            if told and not told.get("interrupt"):
                self._run.reporter.lingers(told.get("rank", local), told)

    def _tell(self, worker_group: WorkerGroup, result: RunResult) -> None:
        for ended in result.failures.values():
            seen = self._seen.get(ended.local_rank, Seen(time.time()))
            ended.seen = Seen(
                seen.time, seen.stopped, _text(failure.fault_file(self._pcontext.error_files[ended.local_rank]))
            )
        self._complete_logs()
        attempt, attempts = self._attempt(worker_group)
        self._run.reporter.failed(result.failures, attempt, attempts if self._remaining_restarts else attempt)

    def _complete_logs(self) -> None:
        """Put tracebacks that were left to us into the files of those processes, where one looks for them."""
        for local, path in self._pcontext.stderrs.items():
            told = _read(self._pcontext.error_files[local])
            if path and told and not told.get("shown"):
                with (
                    contextlib.suppress(OSError),
                    open(path, "a", encoding="utf-8", errors="backslashreplace") as file,
                ):
                    file.write(told["traceback"])

    def _preempted(self) -> bool:
        return PREEMPTED in self._statuses().values()

    def _is_ending(self) -> bool:
        """Whether some processes have ended as preempted, and the others have time left to do so."""
        statuses = set(self._statuses().values())
        if PREEMPTED not in statuses or None not in statuses or not statuses <= {PREEMPTED, 0, None}:
            return False
        self._ending_since = self._ending_since or time.monotonic()
        return time.monotonic() - self._ending_since < ENDING_S

    def _waits_for_cause(self) -> bool:
        """Whether all that failed lost a connection, and the process which closed it has time left to end by itself."""
        statuses = self._statuses()
        failed = [local for local, status in statuses.items() if status]
        if not failed or self._forwarded or None not in statuses.values():
            return False
        told = [_read(path) for path in self._pcontext.error_files.values()]
        if not all(follows(told[local] or {}) for local in failed) or any(each and not follows(each) for each in told):
            return False
        self._caused_since = self._caused_since or time.monotonic()
        return time.monotonic() - self._caused_since < _CAUSE_S

    # -- ending ------------------------------------------------------------------------------------------------------

    def _stop_workers(self, *args: Any, **kwargs: Any) -> None:
        super()._stop_workers(*args, **kwargs)
        self._gone = True
        self.sweep()

    def sweep(self) -> None:
        """End what processes that have failed or were stopped had started and left behind."""
        groups, self._groups = self._groups, []
        end_groups(groups, 0.0 if self._stopping and self._killed() else _ORPHANS_S)

    def _killed(self) -> bool:
        return -getattr(signal, "SIGKILL", 9) in self._statuses().values()

    def close(self) -> None:
        """Say where an interrupted run stood, and take away what nobody needs."""
        if self._pcontext is None or self._run.reporter is None:
            return
        told = [_read(path) for path in self._pcontext.error_files.values()]
        if self._stopping == signal.SIGINT:
            self._run.reporter.interrupted({record["rank"]: record for record in told if record})
            self._complete_logs()
        for path in map(failure.fault_file, self._pcontext.error_files.values()):
            with contextlib.suppress(OSError):
                if os.path.getsize(path) == 0:
                    os.remove(path)


def _read(path: str) -> Mapping[str, Any] | None:
    """Return our part of an error file, or None."""
    try:
        with open(path, encoding="utf-8") as file:
            told = json.load(file).get(failure.OURS)
    except (OSError, ValueError, AttributeError):
        return None
    return told if isinstance(told, dict) else None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


# The agents of this process and what they belong to, the running one last, and the process that passes signals on to them.
_agents: list[Agent] = []
_runs: list[Run] = []
_home = 0
# As the program was started.
_hangups_are_ignored = hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@contextlib.contextmanager
def watched(agent: type[Agent], run: Run) -> Iterator[None]:
    """Let torch's launcher use our agent, give that the signals, and leave nothing behind.

    Args:
        agent: the class of the agent.
        run: what it needs.
    """
    global _home
    count, torch_agent = len(_agents), api.LocalElasticAgent
    # The launcher builds its agent itself and takes no other class.
    api.LocalElasticAgent = agent
    _runs.append(run)
    former = {}
    if threading.current_thread() is threading.main_thread():
        _home = os.getpid()
        former = {number: signal.getsignal(number) for number in (*FORWARDED, *STOPPING)}
        _install()
    try:
        yield
    except BaseException:
        for failed in _agents[count:]:
            failed.sweep()
        raise
    finally:
        for ended in _agents[count:]:
            ended.close()
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        api.LocalElasticAgent = torch_agent
        del _agents[count:]
        _runs.pop()
        if run.guard is not None:
            run.guard.close()


def _install() -> None:
    """Put our handlers in place, where `start` runs in the main thread of this process."""
    if _home != os.getpid() or threading.current_thread() is not threading.main_thread():
        return
    for number in FORWARDED:
        signal.signal(number, _forward)
    for number in STOPPING:
        # `nohup` means that the run goes on when the terminal is closed.
        if number == signal.SIGINT or not _hangups_are_ignored:
            signal.signal(number, _stop)
        else:
            signal.signal(number, signal.SIG_IGN)


def _forward(number: int, frame: types.FrameType | None) -> None:
    _check_home(number)
    _agents[-1].forward(number)


def _stop(number: int, frame: types.FrameType | None) -> None:
    _check_home(number)
    _agents[-1].stop(number)


def _check_home(number: int) -> None:
    if os.getpid() != _home:  # a worker that was forked has this handler too, and nobody to pass the signal on to
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    if not _agents:  # nothing has been started yet
        raise SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))
