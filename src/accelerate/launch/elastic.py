"""Several processes on one machine, under torch's elastic launcher. Importing this module imports torch.

Source: https://pytorch.org/docs/stable/elastic/run.html
"""

import contextlib
import datetime
import logging
import os
import signal
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher import api
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch.plan import Rendezvous

# The name under which torch finds the rendezvous below.
ONE_MACHINE = "accelerate_one_machine"
_HOST = "127.0.0.1"
# Signals that are passed on to the processes, which may want time to save their run. Schedulers send these.
FORWARDED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))
# A scheduler may send a signal to all processes of a job more than once in short order; that is one request.
_REPEAT_S = 5.0
# How long the others have for their own ending when one process has ended as preempted.
_ENDING_S = 300.0


class OneMachineRendezvous(RendezvousHandler):
    """A meeting point for the processes of one machine: a store at a port that the system chooses.

    The store listens before anybody is told its port, so no other job can take the port in between; and there is nobody
    to agree with, which makes it a quarter of a second quicker than torch's own `c10d` rendezvous.

    Args:
        parameters: what the elastic launcher was configured with; the port of the endpoint may be 0.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._port = int(parameters.endpoint.rpartition(":")[2])
        self._timeout = datetime.timedelta(seconds=int(parameters.config.get("timeout", 600)))
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return ONE_MACHINE

    @property
    def use_agent_store(self) -> bool:
        """True: the processes meet at this very store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new store.

        Restarted processes must not find what the previous ones left in theirs (the addresses of dead peers). The
        previous store may still hold the port that was asked for, so a restart takes another one.
        """
        port = self._port if self._store is None else 0
        self._store = TCPStore(_HOST, port, is_master=True, timeout=self._timeout, wait_for_workers=False)
        meeting_point = RendezvousStoreInfo(_HOST, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, meeting_point)

    def is_closed(self) -> bool:
        """False: there is nobody who could close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other machine can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Report success: the store ends with the process."""
        return True


@contextlib.contextmanager
def log_directory(given: str | None) -> Iterator[str]:
    """Return a directory for the files of a run; torch would leave a new one behind for every run.

    Args:
        given: the directory that the user named; None makes one and removes it afterwards.
    """
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="accelerate_launch_", ignore_cleanup_errors=True) as directory:
        yield directory


def make_config(
    num_processes: int,
    rendezvous: Rendezvous,
    log_dir: str,
    tee: str = "0",
    **rest: Any,
) -> LaunchConfig:
    """Return the settings of torch's elastic launcher for one machine.

    Args:
        num_processes: how many processes to start.
        rendezvous: how they meet.
        log_dir: directory of their error files, and of their output if `tee` asks for it.
        tee: which streams to copy into files, in torch's notation.
        rest: further fields of `torch.distributed.launcher.api.LaunchConfig`.
    """
    backend = rendezvous.backend
    if backend == "static":
        backend = ONE_MACHINE
        if ONE_MACHINE not in _registered:
            rendezvous_handler_registry.register(ONE_MACHINE, OneMachineRendezvous)
            _registered.add(ONE_MACHINE)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"accelerate-{os.getpid()}",
        rdzv_endpoint=rendezvous.endpoint,
        rdzv_backend=backend,
        rdzv_configs=dict(rendezvous.settings),
        # The name of this machine may not be resolvable, least of all in a container.
        local_addr=_HOST,
        logs_specs=DefaultLogsSpecs(log_dir=log_dir, tee=Std.from_str(tee)),
        **_own_signals(),
        **rest,
    )


def _own_signals() -> dict[str, str]:
    # The others are `_forwarding`'s. Older versions of torch cannot be told, and take SIGTERM for themselves.
    known = "signals_to_handle" in LaunchConfig.__dataclass_fields__
    return {"signals_to_handle": "SIGINT,SIGHUP,SIGQUIT"} if known else {}


_registered: set[str] = set()


class Agent(LocalElasticAgent):
    """Torch's agent for processes that save their run when a signal comes.

    It passes the signal on and waits, where torch kills them after half a minute; and it lets all of them end by themselves when
    one ends as preempted, and does not start them again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._received: dict[int, float] = {}
        self._forwarded: set[int] = set()
        self._ending_since: float | None = None
        _agents.append(self)

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
        self._pass_on()

    def _pass_on(self) -> None:
        processes = self._processes()
        for number in list(self._received) if processes else ():
            if number not in self._forwarded:
                self._forwarded.add(number)
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)

    def _processes(self) -> list[int]:
        return [] if self._pcontext is None else list(self._pcontext.pids().values())

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._pass_on()  # what came while the processes were being started
        if self._forwarded or self._preempted():
            self._remaining_restarts = 0
        if self._is_ending():
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        for number in self._forwarded:
            if any(failure.exitcode == -number for failure in result.failures.values()):
                # They did not want it, and are gone; what they had started should go, too.
                for process in self._processes():
                    with contextlib.suppress(OSError):
                        os.killpg(process, number)
                raise SignalException("the processes were stopped", sigval=signal.Signals(number))
        return result

    def _statuses(self) -> list[int | None]:
        handlers = getattr(self._pcontext, "subprocess_handlers", None) or {}
        return [handler.proc.poll() for handler in handlers.values()]

    def _preempted(self) -> bool:
        return PREEMPTED in self._statuses()

    def _is_ending(self) -> bool:
        """Whether some processes have ended as preempted, and the others have time left to do so."""
        statuses = self._statuses()
        if PREEMPTED not in statuses or None not in statuses or not {*statuses} <= {PREEMPTED, 0, None}:
            return False
        self._ending_since = self._ending_since or time.monotonic()
        return time.monotonic() - self._ending_since < _ENDING_S


# The agents of this process, the running one last, and the process that passes signals on to them.
_agents: list[Agent] = []
_home = 0


@contextlib.contextmanager
def _forwarding() -> Iterator[None]:
    """Let torch's launcher use our agent, and give that the signals it forwards."""
    count, agent_class = len(_agents), api.LocalElasticAgent
    # The launcher builds its agent itself and takes no other class.
    api.LocalElasticAgent = Agent
    former = {}
    if threading.current_thread() is threading.main_thread():
        global _home
        _home = os.getpid()
        former = {number: signal.signal(number, _forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        api.LocalElasticAgent = agent_class
        del _agents[count:]


def _forward(number: int, frame: types.FrameType | None) -> None:
    if os.getpid() != _home:  # a worker that was forked has this handler too, and nobody to pass the signal on to
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    if not _agents:  # nothing has been started yet
        raise SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))
    _agents[-1].forward(number)


def start(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
    verbose: bool = False,
) -> dict[int, Any]:
    """Start processes and wait for all of them. A failed one stops the others, and so does a signal; none stays behind.

    Args:
        config: what `make_config` returned.
        entrypoint: a program, or a function.
        arguments: its arguments.
        environment: all variables of the processes.
        verbose: let torch log failures in its own words.

    Returns:
        What a function returned, by rank.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a process failed.
        torch.distributed.elastic.multiprocessing.api.SignalException: a signal stopped them.
    """
    with _variables(environment), _quiet_agent(verbose), _forwarding():
        return elastic_launch(config, entrypoint)(*arguments)


@contextlib.contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    # The elastic launcher starts processes with the variables of this one.
    before = dict(os.environ)
    try:
        _assign(wanted)
        yield
    finally:
        _assign(before)


def _assign(wanted: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name not in wanted]:
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextlib.contextmanager
def _quiet_agent(verbose: bool) -> Iterator[None]:
    # Its lines about a failure say in torch's words what the caller reports in plain ones.
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level = logger.level
    if not verbose:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
