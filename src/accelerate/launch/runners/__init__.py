"""Start what a plan says. One module a way of starting.

A runner is a module of this folder with two functions:

- `processes(plan, environment)` returns what would be started, and starts nothing: `--dry-run` prints it.
- `run(plan, environment, replace)` starts it and waits for its end. A failure is raised; `errors.failure_of` turns it into an
  exit status and a line. `replace` becomes the process that is started, where that is possible.

`environment` is what `accelerate.launch.plan.worker_environment` made of the plan: all variables, those of the launcher included.
Both raise `LaunchError` where the request cannot be run as written.
"""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from accelerate.launch.errors import PREFIX, failure_of, to_stderr
from accelerate.launch.plan import LaunchPlan, worker_environment

__all__ = ["PREFIX", "RUNNERS", "Process", "failure_of", "of", "processes", "run", "tell"]

# What a plan's `runner` is called -> who starts the processes, for people.
RUNNERS = {
    "single": "in place of the launcher",
    "local": "by torch's elastic launcher on this machine",
    "machines": "by torch's elastic launcher on each machine",
    "mpi": "by mpirun",
    "deepspeed": "by DeepSpeed's launcher",
    "tpu": "by torch_xla on this machine",
    "tpu_pod": "by the machines of a TPU pod",
    "sagemaker": "by a job of Amazon SageMaker",
}
# Those whose module is called otherwise.
_MODULES = {"single": "local", "tpu_pod": "tpu"}


@dataclass(frozen=True)
class Process:
    """A process that a plan would start.

    Attributes:
        label: what it is to the run, such as "rank 3", "launcher on host b", "job".
        command: program and arguments.
        environment: all its variables.
    """

    label: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


def of(plan: LaunchPlan) -> ModuleType:
    """Return the runner of a plan; it is imported when it is needed."""
    return importlib.import_module(f"accelerate.launch.runners.{_MODULES.get(plan.runner, plan.runner)}")


def run(plan: LaunchPlan, replace: bool = False) -> None:
    """Run a plan to its end.

    Args:
        plan: what is started.
        replace: become the process that is started, where that is possible: no parent stays behind, and the call does
            not return. Only for a process that has nothing else to do.

    Raises:
        LaunchError: what the runner needs is not there; nothing was started.
        subprocess.CalledProcessError: the one process, or the program that starts them all, failed.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: one of several processes failed.
        torch.distributed.elastic.multiprocessing.api.SignalException: a signal stopped them.
    """
    environment = worker_environment(plan, os.environ)
    tell(plan, *plan.notes)
    of(plan).run(plan, environment, replace)


def processes(plan: LaunchPlan) -> list[Process]:
    """Return the processes that a plan would start on this machine, or the commands that start them elsewhere."""
    return of(plan).processes(plan, worker_environment(plan, os.environ))


def tell(plan: LaunchPlan, *lines: str, always: bool = False) -> None:
    """Print lines of information, without a prefix here, unless the plan is quiet.

    Args:
        plan: what is started.
        lines: the lines.
        always: print them for a quiet plan, too.
    """
    if always or not plan["quiet"]:
        for line in lines:
            to_stderr(f"{PREFIX}{line}\n")
