"""Processes that run a function on the TPU of this machine, started by torch_xla, which knows its cores."""

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accelerate.launch.notebook import failures
from accelerate.launch.notebook.request import Request
from accelerate.launch.notebook.shipping import FORK
from accelerate.launch.notebook.worker import Worker


class XlaWorker:
    """What a process of torch_xla's runs, or a thread of it on older TPUs: it is called with its number.

    Args:
        function: the function.
        directory: where the processes write down why they fail.
        expected: how many processes there should be on this machine; None is as many as there are.
    """

    def __init__(self, function: Callable[..., Any], directory: str, expected: int | None) -> None:
        self.function = function
        self.directory = directory
        self.expected = expected

    def __call__(self, index: int, *args: Any) -> None:
        """Run the function.

        Args:
            index: the number of this process among all.
            args: of the function.
        """
        Worker(self._checked, self.directory, forked=True, rank=index)(*args)

    def _checked(self, *args: Any) -> None:
        runtime = importlib.import_module("torch_xla.runtime")
        found = runtime.local_process_count() * runtime.addressable_device_count()
        if self.expected not in (None, found):
            raise ValueError(
                f"num_processes is {self.expected}, and torch_xla runs {found} on this machine, one for each core. Leave num_processes "
                "out to use all, or give 1."
            )
        self.function(*args)


class OneCore:
    """The function in this very process, without the number that torch_xla gives it.

    Args:
        function: the function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, index: int, *args: Any) -> None:
        """Run the function.

        Args:
            index: dropped.
            args: of the function.
        """
        self.function(*args)


def run(request: Request, environment: Mapping[str, str]) -> None:
    """Start one process for each TPU core and wait for their end; with `num_processes=1`, use one core from here.

    Args:
        request: what was asked for, checked.
        environment: all variables of the processes.

    Raises:
        RuntimeError: this process uses the TPU already.
        WorkerError: a process failed.

    Source: https://docs.pytorch.org/xla/master/learn/api-guide.html
    """
    _refuse_runtime()
    starter = importlib.import_module("torch_xla.distributed.xla_multiprocessing")
    if request.num_processes == 1:
        with _variables(environment):
            starter.spawn(OneCore(request.function), args=tuple(request.args), nprocs=1, start_method=FORK)
        return
    with tempfile.TemporaryDirectory(prefix="accelerate_launch_", ignore_cleanup_errors=True) as directory:
        worker = XlaWorker(request.function, directory, request.num_processes)
        try:
            with _variables(environment):
                # It starts as many as there are cores, and takes no other number.
                starter.spawn(worker, args=tuple(request.args), nprocs=None, start_method=FORK)
        except Exception as error:
            if found := tuple(failures.written(directory)):
                raise failures.build(request.name, found) from None
            if type(error).__name__ == "BrokenProcessPool":
                raise failures.WorkerError(
                    f"A process of {request.name} ended without a traceback: the system or a fault in machine code has killed it. "
                    f"torch_xla says: {error}"
                ) from None
            raise


def _refuse_runtime() -> None:
    library = getattr(importlib.import_module("torch_xla"), "_XLAC", None)
    if getattr(library, "_xla_runtime_is_initialized", lambda: False)():
        raise RuntimeError(
            "This process uses the TPU already, and no further processes can be started for it. Restart the notebook, and call "
            "`xla_device()`, `.to(...)` and the like only inside the training function."
        )


@contextlib.contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
