"""Start a training function in several processes from a notebook, a console or a test."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.config.options import BY_NAME
from accelerate.launch.errors import NotAvailableError
from accelerate.utils.constants import ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION

__all__ = [
    "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION",
    "WorkerError",
    "debug_launcher",
    "notebook_launcher",
    "test_launch",
]

# A port that nobody chose: torch's default.
_UNCHOSEN_PORTS = ("29500", "0", "", "None")


class WorkerError(RuntimeError):
    """A process that was started has failed; the message holds its traceback."""


def test_launch() -> None:
    """Join the other processes and do nothing else, to see whether a launch works.

    Every process calls it.

    Example:
        >>> debug_launcher(test_launch, num_processes=2)
    """
    from accelerate.state import PartialState

    PartialState()


test_launch.__test__ = False  # pytest collects functions of this name


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run a training function in several processes, from a notebook or a console.

    The processes are forked, so the function may live in a cell. Build the `Accelerator`, and touch a GPU, only inside it.
    One process is no process at all: the function runs right here.

    Args:
        function: what every process runs. What it returns is dropped.
        args: its arguments.
        num_processes: how many processes on this machine; None is one for each GPU, or one. Without a GPU they run on the
            CPU and talk through gloo.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; what `Accelerator()` uses inside the function.
        use_port: at which port the processes meet. On one machine the default takes a free one.
        master_addr: the address of machine 0, with several machines.
        node_rank: the number of this machine, from 0.
        num_nodes: how many machines take part; call this on each of them.
        rdzv_backend: how machines find each other: "static" or "c10d".
        rdzv_endpoint: where; `master_addr:use_port` by default.
        rdzv_conf: further settings of that method.
        rdzv_id: the name of the run.
        max_restarts: how often to restart all processes after a failure.
        monitor_interval: how often to look whether they are alive, in seconds.
        log_line_prefix_template: what stands before each line of their output.

    Raises:
        WorkerError: a process failed; its traceback is in the message.
        ValueError: the arguments do not fit the machine, or an `Accelerator` exists already.
        RuntimeError: a GPU is in use in this process already, so that it cannot be forked.

    Example:
        >>> def train(rate):
        ...     print(f"Training at {rate}.")
        >>> notebook_launcher(train, args=(0.1,), num_processes=1)  # doctest: +ELLIPSIS
        Launching training on one ...
        Training at 0.1.
    """
    from accelerate.devices import probe

    precision = BY_NAME["mixed_precision"].parse(mixed_precision)
    device = probe.detect()
    if device.type == "xla":
        raise NotAvailableError(
            "notebook_launcher on TPUs is not available in this version yet. What works: GPUs, or ACCELERATE_USE_CPU=true."
        )
    devices = device.count() if device.type != "cpu" else 0
    num_processes = num_processes or devices or 1
    if devices and num_processes > devices:
        raise ValueError(
            f"num_processes is {num_processes}, and there are {devices} {device.type} devices. Ask for at most {devices}, or "
            "set ACCELERATE_USE_CPU=true to run on the CPU."
        )
    environment = {**os.environ, "ACCELERATE_MIXED_PRECISION": precision}
    if num_processes == 1 and num_nodes == 1:
        print(f"Launching training on one {_name(device.type)}.")
        _run_here(function, args, environment)
        return
    _refuse_state()
    _refuse_device(device)
    if not devices:
        environment["ACCELERATE_USE_CPU"] = "true"
    print(f"Launching training on {num_processes * num_nodes} {_name(device.type)}s.")
    meeting = _Meeting(
        port=0 if str(use_port) in _UNCHOSEN_PORTS else int(use_port),
        num_nodes=num_nodes,
        node_rank=node_rank,
        backend=rdzv_backend,
        endpoint=rdzv_endpoint or f"{master_addr}:{use_port}",
        settings=rdzv_conf,
        run_id=rdzv_id,
    )
    _start(
        function,
        args,
        environment,
        num_processes,
        meeting,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        log_line_prefix_template=log_line_prefix_template,
    )


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function in several processes on the CPU, to see distributed code work on any machine.

    The processes are forked and talk through gloo. An `Accelerator` that exists here does not reach them.

    Args:
        function: what every process runs. What it returns is dropped.
        args: its arguments.
        num_processes: how many processes.

    Raises:
        WorkerError: a process failed; its traceback is in the message.
        ValueError: this process is part of a process group.

    Example:
        >>> debug_launcher(test_launch)
    """
    _refuse_group()
    environment = {**os.environ, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true"}
    _start(function, args, environment, num_processes, _Meeting())


class _Worker:
    """The function of a forked process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)

    def __call__(self, *args: Any) -> None:
        import torch

        from accelerate.state import AcceleratorState, GradientState

        # GNU OpenMP does not survive a fork: a parallel region would wait for threads that only the parent has.
        torch.set_num_threads(1)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        # The result would have to be sent home, and need not be picklable.
        self.function(*args)


@dataclass(frozen=True)
class _Meeting:
    """How the processes find each other; the fields are the arguments of `notebook_launcher`."""

    port: int = 0
    num_nodes: int = 1
    node_rank: int = 0
    backend: str = "static"
    endpoint: str = ""
    settings: Mapping[str, Any] | None = None
    run_id: str = "none"


def _config(num_processes: int, meeting: _Meeting, log_dir: str, rest: Mapping[str, Any]) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from accelerate.launch import elastic
    from accelerate.launch.plan import Rendezvous

    settings = dict(meeting.settings or {})
    if meeting.num_nodes == 1:
        rendezvous = Rendezvous(meeting.backend, port=meeting.port, settings=settings)
        return elastic.make_config(num_processes, rendezvous, log_dir, start_method="fork", **rest)
    if meeting.backend == "static":
        settings.setdefault("rank", meeting.node_rank)
    return LaunchConfig(
        min_nodes=meeting.num_nodes,
        max_nodes=meeting.num_nodes,
        nproc_per_node=num_processes,
        run_id=meeting.run_id,
        rdzv_endpoint=meeting.endpoint,
        rdzv_backend=meeting.backend,
        rdzv_configs=settings,
        logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        start_method="fork",
        **rest,
    )


def _start(
    function: Callable[..., Any],
    args: Sequence[Any],
    environment: Mapping[str, str],
    num_processes: int,
    meeting: _Meeting,
    **rest: Any,
) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from accelerate.launch import elastic

    try:
        with elastic.log_directory(None) as directory:
            config = _config(num_processes, meeting, directory, rest)
            elastic.start(config, _Worker(function), tuple(args), environment)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise WorkerError(f"Rank {rank} failed in {_Worker(function).__name__}:\n\n{_traceback(failure)}") from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise


def _traceback(failure: Any) -> str:
    """Return the traceback that a failed process left in its error file, or at least how it ended."""
    message = (failure.error_file_data or {}).get("message")
    if isinstance(message, dict):
        return message.get("extraInfo", {}).get("py_callstack") or str(message.get("message"))
    return str(failure.message)


def _run_here(function: Callable[..., Any], args: Sequence[Any], environment: Mapping[str, str]) -> None:
    before = os.environ.get("ACCELERATE_MIXED_PRECISION")
    os.environ["ACCELERATE_MIXED_PRECISION"] = environment["ACCELERATE_MIXED_PRECISION"]
    try:
        function(*args)
    finally:
        if before is None:
            os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        else:
            os.environ["ACCELERATE_MIXED_PRECISION"] = before


def _refuse_state() -> None:
    from accelerate.runtime import storage

    _refuse_group()
    if storage.accelerator.current or storage.process.current:
        raise ValueError(
            "This process has an Accelerator already, and the processes to be started would inherit it. Restart the "
            "notebook, and build the Accelerator only inside the training function."
        )


def _refuse_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        raise ValueError(
            "This process belongs to a process group, which the processes to be started would inherit. Call "
            "torch.distributed.destroy_process_group() first, or restart."
        )


def _refuse_device(device: Any) -> None:
    if device.type == "cpu" or not getattr(device.namespace(), "is_initialized", lambda: False)():
        return
    loaded = [
        name for name in ("bitsandbytes", "deepspeed", "triton", "xformers", "flash_attn") if name in sys.modules
    ]
    hint = f" Loaded libraries that may have done so: {', '.join(loaded)}." if loaded else ""
    raise RuntimeError(
        f"The {device.type} device is in use in this process already, and a process that uses it cannot be forked. Restart "
        "the notebook, and call `.to(...)`, `.cuda()` and the like only inside the training function. If no cell does, an "
        f"imported library does.{hint}"
    )


def _name(device_type: str) -> str:
    return {"cuda": "GPU", "cpu": "CPU"}.get(device_type, device_type.upper())
