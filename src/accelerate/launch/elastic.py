"""Several processes on one machine, under torch's elastic launcher. Importing this module imports torch.

Source: https://pytorch.org/docs/stable/elastic/run.html
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accelerate.launch import logs
from accelerate.launch.agent import ENDING_S, Agent, Run, watched
from accelerate.launch.guard import Guard
from accelerate.launch.one_machine import HOST, ONE_MACHINE, OneMachineRendezvous, without_libuv
from accelerate.launch.plan import Rendezvous
from accelerate.launch.runners.failures import Reporter
from accelerate.runtime import failure

__all__ = ["ENDING_S", "Agent", "log_directory", "logs_specs", "make_config", "own_signals", "start"]

log_directory = logs.directory


def logs_specs(log_dir: str, tee: str | Mapping[int, int]) -> DefaultLogsSpecs:
    """Return where torch's launcher writes the output of processes.

    Args:
        log_dir: the directory.
        tee: which streams to copy there: torch's notation, or what `accelerate.launch.logs.streams` returned.
    """
    chosen = Std.from_str(tee) if isinstance(tee, str) else {rank: Std(value) for rank, value in tee.items()}
    return DefaultLogsSpecs(log_dir=log_dir, tee=chosen)


def make_config(
    num_processes: int,
    rendezvous: Rendezvous,
    log_dir: str,
    tee: str | Mapping[int, int] = "0",
    **rest: Any,
) -> LaunchConfig:
    """Return the settings of torch's elastic launcher for one machine.

    Args:
        num_processes: how many processes to start.
        rendezvous: how they meet.
        log_dir: directory of their error files, and of their output if `tee` asks for it.
        tee: which streams to copy into files, as in `logs_specs`.
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
        rdzv_configs={**without_libuv(), **rendezvous.settings},
        # The name of this machine may not be resolvable, least of all in a container.
        local_addr=HOST,
        logs_specs=logs_specs(log_dir, tee),
        **own_signals(),
        **rest,
    )


def own_signals() -> dict[str, str]:
    """Return the setting that keeps torch's hands off the signals that `start` handles; older versions cannot be told."""
    if "signals_to_handle" not in LaunchConfig.__dataclass_fields__:
        return {}
    # It wants one at least. Nobody sends these two by accident.
    return {"signals_to_handle": "SIGQUIT" if hasattr(signal, "SIGQUIT") else "SIGBREAK"}


_registered: set[str] = set()


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
        agent: who watches over them.
        reporter: tells people what happens to the processes of a program; one that prints it all by default.

    Returns:
        What a function returned, by rank.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a process failed.
        torch.distributed.elastic.multiprocessing.api.SignalException: a signal stopped them.
    """
    run = Run()
    if isinstance(entrypoint, str):
        run = Run(reporter or Reporter(), Guard(float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))))
        # Its processes leave their tracebacks to us.
        environment = {**environment, failure.LAUNCHER: str(os.getpid())}
        if sys.platform == "win32":
            environment.setdefault("USE_LIBUV", "0")
    with _variables(environment), _quiet_agent(verbose), watched(agent, run):
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


# Torch's lines about failures and signals say in its words what we report in plain ones.
_QUIET = {
    "torch.distributed.elastic.multiprocessing.api": logging.CRITICAL,
    "torch.distributed.elastic.agent.server.api": logging.ERROR,
}


@contextlib.contextmanager
def _quiet_agent(verbose: bool) -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in _QUIET}
    if not verbose:
        for name, level in _QUIET.items():
            logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
