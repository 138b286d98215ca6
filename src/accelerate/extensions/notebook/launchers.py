"""Start a training function in several processes from a notebook, a console or a test."""

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accelerate.base._warn import warn_user
from accelerate.base.environment import is_colab, patch_environment
from accelerate.extensions.notebook import processes as notebook
from accelerate.extensions.notebook.processes import MeetingError, Request, WorkerError, check
from accelerate.launch.errors import LaunchError, WorkerFailure

__all__ = [
    "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION",
    "MeetingError",
    "WorkerError",
    "WorkerFailure",
    "debug_launcher",
    "notebook_launcher",
    "test_launch",
]
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"


class NotAvailableError(LaunchError, NotImplementedError):
    """The request is understood, and nothing that is installed here can run it."""


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

    The processes are forked, so the function may be defined in a cell. Build the `Accelerator`, and use a GPU, only inside it.
    With one process the function runs in this process. On a TPU, torch_xla starts one process for each core. No configuration
    file is read; variables such as ACCELERATE_USE_CPU are.

    Not a collective.

    Args:
        function: the function of every process. Its result is dropped.
        args: its arguments.
        num_processes: how many processes on this machine; None is one for each GPU, or one. Without a GPU they run on the
            CPU and use gloo.
        mixed_precision: "no", "fp16", "bf16" or "fp8", for `Accelerator()` inside the function. "no" leaves it to the
            variable ACCELERATE_MIXED_PRECISION.
        use_port: the port at which the processes meet. On one machine the default takes a free one.
        master_addr: the address of machine 0, with several machines.
        node_rank: the number of this machine, from 0. With c10d the machines number themselves.
        num_nodes: how many machines take part; call this on each of them.
        rdzv_backend: the method by which machines find each other: "static" or "c10d".
        rdzv_endpoint: the meeting point; `master_addr:use_port` by default.
        rdzv_conf: further settings of that method: "timeout" (static) and "join_timeout" (c10d) are the seconds that
            machines wait for each other.
        rdzv_id: the name of the run.
        max_restarts: how often to restart all processes after a failure.
        monitor_interval: how often to look whether they are alive, in seconds.
        log_line_prefix_template: has no effect, with a warning.

    Raises:
        WorkerError: a process failed; its traceback is in the message.
        MeetingError: the port is taken, or a machine did not come in time.
        ValueError: an argument has an impossible value or does not fit the machine, an `Accelerator` exists already, or this
            process is part of a run.
        TypeError: an argument has the wrong type, or `function` does not take `args`.
        LaunchError: a GPU is in use in this process already, and `function` cannot be sent to fresh ones.
        RuntimeError: a fresh process imports a script that calls this without `if __name__ == "__main__"`.

    Example:
        >>> def train(rate):
        ...     print(f"Training at {rate}.")
        >>> notebook_launcher(train, args=(0.1,), num_processes=1)  # doctest: +ELLIPSIS
        Launching training on one ...
        Training at 0.1.
    """
    arguments = locals()
    if arguments.pop("log_line_prefix_template") is not None:
        warn_user(
            "log_line_prefix_template has no effect: write the rank in front of the lines that the function prints."
        )
    request = Request(**arguments)  # its fields are these arguments
    check(request)
    _refuse_nesting("notebook_launcher", request.num_nodes == 1 and num_processes == 1)
    hosted = is_colab() or any(name.startswith("KAGGLE") for name in os.environ)
    if hosted and "TPU_NAME" in os.environ and importlib.util.find_spec("torch_xla") is None:
        raise NotAvailableError(
            "This notebook has a TPU (TPU_NAME is set), and torch_xla, which uses it, is not installed. Install it, in the release of "
            f"torch {torch.__version__}, and restart; or choose a machine without a TPU."
        )
    from accelerate.devices import table

    # Torch's usual look for GPUs starts the driver, and processes that are forked afterwards cannot use it.
    with patch_environment(pytorch_nvml_based_cuda_check=1):
        device = table.detect()
    variables = {}
    if request.precision != "no" or "ACCELERATE_MIXED_PRECISION" not in os.environ:
        variables["ACCELERATE_MIXED_PRECISION"] = request.precision
    if device.type == "xla":
        _launch_xla(request, variables)
        return
    count = _count(request, device)
    alone = count == 1 and num_nodes == 1
    if not alone:
        _refuse_state()
    print(f"Launching training on {_counted(count * num_nodes, device.type)}.")
    if alone:
        _run_here(request, variables)
        return
    if device.type == "cpu":
        variables["ACCELERATE_USE_CPU"] = "true"
    if num_nodes > 1:
        who = f"Number {node_rank}" if rdzv_backend == "static" else "One"
        print(f"{who} of {num_nodes} machines waits at {request.endpoint} for the others.")
    notebook.run(request, _environment(variables), count, notebook.method_for(device))


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function in several processes on the CPU, to test distributed code on any machine.

    The processes are forked and use gloo. An existing `Accelerator` of this process does not reach them.

    Not a collective.

    Args:
        function: the function of every process. Its result is dropped.
        args: its arguments.
        num_processes: how many processes.

    Raises:
        WorkerError: a process failed; its traceback is in the message.
        ValueError: an argument has an impossible value, or this process is part of a process group or of a run.
        TypeError: an argument has the wrong type, or `function` does not take `args`.

    Example:
        >>> debug_launcher(test_launch)
    """
    request = Request(function, args, num_processes)
    check(request)
    _refuse_nesting("debug_launcher")
    _refuse_group()
    environment = _environment({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true"})
    notebook.run(request, environment, num_processes, "fork" if hasattr(os, "fork") else "spawn")


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the processes: those of this one, with changes."""
    environment = {**os.environ, **changes}
    # Tokenizers refuses to use its threads in a forked process, and prints so each time unless this is set.
    if "tokenizers" in sys.modules:
        environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment


def _count(request: Request, device: Any) -> int:
    """Return how many processes to start on this machine."""
    devices = device.count() if device.type != "cpu" else 0
    asked = request.num_processes
    if is_colab() and asked is not None and asked > (devices or 1) and "ACCELERATE_USE_CPU" not in os.environ:
        # Notebooks that were written for a larger machine are opened there.
        process_count = devices or 1
        print(f"Colab has {_counted(process_count, device.type)} here; num_processes={asked} is not used.")
        return process_count
    if devices and asked is not None and asked > devices:
        raise ValueError(
            f"num_processes is {asked}, and there are {devices} {device.type} devices. Ask for at most {devices}, or "
            "set ACCELERATE_USE_CPU=true to run on the CPU."
        )
    return asked or devices or 1


def _launch_xla(request: Request, variables: Mapping[str, str]) -> None:
    if request.num_processes != 1:
        _refuse_state()
    cores = "one TPU core" if request.num_processes == 1 else f"{request.num_processes or 'all'} TPU cores"
    print(f"Launching training on {cores}.")
    with patch_environment(**variables):
        notebook.run_on_tpu(request)


def _run_here(request: Request, variables: Mapping[str, str]) -> None:
    from accelerate.runtime import storage

    empty = [slot for slot in (storage.accelerator, storage.process) if not slot.current]
    try:
        with patch_environment(**variables):
            request.function(*request.args)
    finally:
        # Processes that are started later must not inherit the function's state; its own objects keep it.
        for slot in empty:
            slot.renew()


def _refuse_nesting(launcher: str, harmless: bool = False) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            f"{launcher} starts fresh processes, which import this script: put it behind `if __name__ == '__main__':`."
        )
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is None or not size.isdigit() or int(size) < 2 or harmless:
        return
    raise ValueError(
        f"{launcher} is called in a process that is rank {rank} of {size} already: accelerate launch, torchrun or a launcher of "
        "functions has started it. Call the function directly there. If this is not so, unset RANK and WORLD_SIZE."
    )


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


def _counted(count: int, device_type: str) -> str:
    name = {"cuda": "GPU", "cpu": "CPU"}.get(device_type, device_type.upper())
    return f"one {name}" if count == 1 else f"{count} {name}s"
