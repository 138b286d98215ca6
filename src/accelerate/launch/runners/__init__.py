"""Start what a plan says. One module a way of starting; `base` says what each offers."""

import importlib
import os
from types import ModuleType

from accelerate.launch.env import worker_environment
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.runners.base import Process
from accelerate.launch.runners.failures import failure_of, to_stderr

__all__ = ["PREFIX", "RUNNERS", "Process", "failure_of", "of", "processes", "run", "tell"]

PREFIX = "accelerate launch: "

# What a plan's `runner` is called -> who starts the processes, for people. Each is a module of this folder, imported when it is needed.
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


def of(plan: LaunchPlan) -> ModuleType:
    """Return the runner of a plan.

    Args:
        plan: what is started.
    """
    return importlib.import_module(f"accelerate.launch.runners.{plan.runner}")


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
    """Return the processes that a plan would start on this machine, or the commands that start them elsewhere.

    Args:
        plan: what would be started.
    """
    return of(plan).processes(plan, worker_environment(plan, os.environ))


def tell(plan: LaunchPlan, *lines: str, always: bool = False) -> None:
    """Print lines of information, unless the plan is quiet.

    Args:
        plan: what is started.
        lines: the lines, without a prefix.
        always: even then.
    """
    if always or not plan["quiet"]:
        for line in lines:
            to_stderr(f"{PREFIX}{line}\n")
