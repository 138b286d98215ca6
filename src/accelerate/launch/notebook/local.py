"""Processes of this machine that run a function, under torch's elastic launcher; perhaps together with other machines."""

import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch.errors import LaunchError, RunError
from accelerate.launch.notebook import failures, output
from accelerate.launch.notebook.request import Request
from accelerate.launch.notebook.shipping import FORK, Shipment
from accelerate.launch.notebook.worker import Worker
from accelerate.launch.plan import Rendezvous

_TIMEOUT_S = 600
_PREFIX = "[rank ${rank}] "
# Torch puts its own handlers there, and leaves them.
_TAKEN = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_LOGGERS = ("torch.multiprocessing.spawn", "torch.distributed.elastic.agent.server.api")
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
_launching = threading.Lock()


class MeetingError(RunError):
    """The processes could not meet: nobody answered in time, the port is taken, or a machine was lost."""


def run(request: Request, shipment: Shipment, environment: Mapping[str, str], num_processes: int) -> None:
    """Start processes and wait for their end.

    Args:
        request: what was asked for, checked.
        shipment: the function, ready to be started.
        environment: all variables of the processes.
        num_processes: how many, on this machine.

    Raises:
        WorkerError: a process failed.
        MeetingError: the processes could not meet.
        LaunchError: the machines do not agree.
        KeyboardInterrupt: the user interrupted; all processes are gone.
        SystemExit: the processes have saved themselves after a signal; the status is that of such a run.
        torch.distributed.elastic.multiprocessing.api.SignalException: another signal stopped them.
        RuntimeError: another thread is at it.
    """
    if not _launching.acquire(blocking=False):
        raise RuntimeError(
            "Another thread of this process is running a launcher. Wait for it, or start the second run in a process of its own."
        )
    endings = failures.Endings()
    try:
        with _handlers_kept(), _quiet(), _nobody_left(endings):
            _start(request, shipment, environment, num_processes, endings)
    finally:
        _launching.release()


def _start(
    request: Request, shipment: Shipment, environment: Mapping[str, str], num_processes: int, endings: failures.Endings
) -> None:
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from accelerate.launch import elastic
    from accelerate.launch.meeting import Elsewhere
    from accelerate.launch.notebook.agent import files_of_output

    with elastic.log_directory(None) as directory:
        # Forked processes have the streams of a notebook; fresh ones have descriptors alone.
        if request.log_line_prefix_template is None and shipment.method != FORK and not output.descriptors_are_shown():
            request = replace(request, log_line_prefix_template=_PREFIX)
        prefixed = request.log_line_prefix_template is not None
        worker = Worker(shipment.function, directory, shipment.method == FORK, to_files=prefixed)
        try:
            config, agent, more = _settings(request, num_processes, directory, shipment.method, endings)
            if prefixed:  # torch puts it before lines that it reads from files, and only there
                config.logs_specs = files_of_output(directory)
            elastic.start(config, worker, shipment.args, {**more, **environment}, agent=agent)
        except ChildFailedError as error:
            found = endings.failures(directory, _reported(error))
            if all(failure.exitcode == PREEMPTED for failure in found):
                raise SystemExit(PREEMPTED) from None
            raise failures.build(request.name, found, _elsewhere(request)) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise
        except Elsewhere as error:
            raise failures.WorkerError(_in_arguments(error)) from None
        except LaunchError as error:
            raise LaunchError(_in_arguments(error)) from None
        except RunError as error:
            raise MeetingError(_in_arguments(error)) from error
        except (dist.DistError, RendezvousError, TimeoutError) as error:
            raise _translated(request, error) from error


def _reported(error: Any) -> tuple[failures.WorkerFailure, ...]:
    """Return what torch says."""
    return tuple(
        failures.WorkerFailure(rank, failure.pid, failure.exitcode) for rank, failure in sorted(error.failures.items())
    )


def _elsewhere(request: Request) -> str:
    if request.num_nodes == 1:
        return ""
    return "Processes of other machines are reported there: where a connection broke, look for the cause on those."


def _in_arguments(error: BaseException) -> str:
    text = str(error)
    for flag, name in _NAMES.items():
        text = text.replace(flag, name)
    return text


def _settings(
    request: Request, num_processes: int, directory: str, method: str, endings: failures.Endings
) -> tuple[Any, Any, Mapping[str, str]]:
    """Return torch's configuration, the class of its agent, and further variables of the processes."""
    from accelerate.launch import elastic
    from accelerate.launch.notebook import agent

    rest = {
        "start_method": method,
        "max_restarts": request.max_restarts,
        "monitor_interval": request.monitor_interval,
        "log_line_prefix_template": request.log_line_prefix_template,
    }
    if request.num_nodes > 1:
        return _settings_of_machines(request, num_processes, directory, rest, endings)
    rendezvous = Rendezvous(request.rdzv_backend, port=request.chosen_port, settings=dict(request.rdzv_conf or {}))
    config = elastic.make_config(num_processes, rendezvous, directory, **rest)
    config.run_id = config.run_id if request.rdzv_id == "none" else request.rdzv_id
    return config, agent.observing(agent.FunctionAgent, endings), {}


def _settings_of_machines(
    request: Request,
    num_processes: int,
    directory: str,
    rest: Mapping[str, Any],
    endings: failures.Endings,
) -> tuple[Any, Any, Mapping[str, str]]:
    from torch.distributed.launcher.api import LaunchConfig

    from accelerate.launch import elastic, elastic_machines, network
    from accelerate.launch.meeting import Meeting
    from accelerate.launch.notebook import agent

    host, _, port = request.endpoint.rpartition(":")
    host, conf = host.strip("[]"), dict(request.rdzv_conf or {})
    address = network.local_address(host, int(port))
    if request.rdzv_backend.startswith("etcd"):  # a server of its own that torch knows how to ask
        config = LaunchConfig(
            min_nodes=request.num_nodes,
            max_nodes=request.num_nodes,
            nproc_per_node=num_processes,
            run_id=request.rdzv_id,
            rdzv_endpoint=request.endpoint,
            rdzv_backend=request.rdzv_backend,
            rdzv_configs=conf,
            local_addr=address,
            logs_specs=elastic.logs_specs(directory, "0"),
            **elastic.own_signals(),
            **rest,
        )
        return config, agent.observing(agent.FunctionAgent, endings), network.gloo_variables(address)
    # With c10d machines number themselves, and everybody's node_rank may be 0.
    machine = None if request.rdzv_backend == "c10d" and request.node_rank == 0 else request.node_rank
    meeting = Meeting(
        host,
        int(port),
        request.num_nodes,
        machine,
        num_processes,
        join_timeout=patience_s(request),
        beat_timeout=float(conf.get("heartbeat_timeout", 30)),
        tell=lambda line: print(_in_arguments(RunError(line))),
    )
    config = elastic_machines.make_config(meeting, address, directory, **rest)
    return config, agent.observing(agent.MachineFunctionAgent, endings), network.gloo_variables(address)


def patience_s(request: Request) -> float:
    """Return for how long machines wait for each other, in seconds.

    Args:
        request: what was asked for.
    """
    settings = request.rdzv_conf or {}
    return float(settings.get("join_timeout", settings.get("timeout", _TIMEOUT_S)))


def _translated(request: Request, error: BaseException) -> MeetingError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if request.num_nodes > 1:
        return MeetingError(
            f"The {request.num_nodes} machines could not meet at {request.endpoint}: {reason}. See that all of them run, with the "
            "same address, port and num_nodes."
        )
    taken = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
    if taken and request.chosen_port:
        argument = "rdzv_endpoint" if request.rdzv_endpoint else "use_port"
        return MeetingError(
            f"{argument} asks for port {request.chosen_port}, which another program listens at. Choose another one, or leave "
            f"{argument} out: a free one is taken then."
        )
    return MeetingError(f"The processes could not meet at 127.0.0.1, port {request.chosen_port or 'any'}: {reason}")


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in _TAKEN if hasattr(signal, name)]
    former = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # They tell of each process that is stopped, which the caller is told as well. Their import sets their levels.
    for name in _LOGGERS:
        importlib.import_module(name)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _nobody_left(endings: failures.Endings) -> Iterator[None]:
    """End every process that is still there: torch forgets those that it had started when its start was interrupted."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        started = endings.processes or set(multiprocessing.active_children()) - before
        for process in started:
            if process.is_alive():
                process.kill()
        for process in started:
            process.join(10)
        raise


def environment_of(**changes: str) -> dict[str, str]:
    """Return the variables of the processes: those of this one, with changes.

    Args:
        changes: further variables.
    """
    environment = {**os.environ, **changes}
    # Tokenizers refuses to use its threads in a forked process, and says so each time unless it is told.
    if "tokenizers" in sys.modules:
        environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment
