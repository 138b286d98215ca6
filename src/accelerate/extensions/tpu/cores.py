"""TPUs of this machine: torch_xla runs a function of the script in a process for each core.

`run` starts this very module as a program
(`python -m accelerate.extensions.tpu.cores`), which imports the script; so the launcher itself needs neither torch nor torch_xla.

Source: https://docs.pytorch.org/xla/master/learn/api-guide.html
"""

import argparse
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from accelerate.extensions.machines import launchers
from accelerate.launch import runners
from accelerate.launch.errors import LaunchError, MissingPackageError
from accelerate.launch.plan import LaunchPlan, Resolved
from accelerate.launch.runners import Process

BY = "by torch_xla on this machine"
_MODULE = "accelerate.extensions.tpu.cores"
MAIN_FUNCTION = "main"


def starts(values: Mapping[str, Resolved], on: set[str], job: Any) -> bool:
    """Return whether the TPU is that of this machine, and not a pod."""
    return not values["tpu_use_cluster"].value


def summary(plan: LaunchPlan) -> str:
    """Return how many processes run on the cores."""
    return f"{plan.num_processes} {'process' if plan.num_processes == 1 else 'processes'} on TPU cores"


def process(plan: LaunchPlan, environment: Mapping[str, str]) -> Process:
    """Return the program that starts the processes of all cores."""
    launchers.refuse_elastic(plan, "torch_xla")
    if plan["no_python"]:
        raise LaunchError("--no_python does not go with --tpu: torch_xla calls a function of a Python script.")
    variables = {**environment, **precision_variables(plan["mixed_precision"], plan["downcast_bf16"])}
    words = [sys.executable, "-m", _MODULE, "--function", plan["main_training_function"] or MAIN_FUNCTION]
    # torch_xla takes one core or all of them.
    words += ["--cores", "1"] if plan.num_processes == 1 else []
    words += ["--module"] if plan["module"] else []
    return Process("torch_xla", (*words, "--", plan.script, *plan.script_args), variables)


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Start that program; the launcher may become it."""
    started = process(plan, environment)
    if importlib.util.find_spec("torch_xla") is None:
        raise MissingPackageError("--tpu needs torch_xla: pip install torch_xla, on a machine with a TPU.")
    runners.start(started.command, started.environment, replace)


def precision_variables(mixed_precision: str | None, downcast: Any) -> dict[str, str]:
    """Return the variables with which torch_xla computes in bfloat16; `downcast` also turns float64 into float32."""
    if mixed_precision != "bf16":
        return {}
    return {"XLA_DOWNCAST_BF16" if is_on(downcast) else "XLA_USE_BF16": "1"}


def is_on(value: object) -> bool:
    """Return whether a setting, which may be a text, is true."""
    return bool(value) and str(value).lower() not in ("no", "false")


def on_core(function: Callable[..., Any], index: int) -> None:
    """Run a function as the process of one core, the one of number `index`."""
    os.environ["FORK_LAUNCHED"] = "1"
    function()


def main() -> None:
    """Import a script and run one of its functions on the cores of this machine, as the command line says."""
    parser = argparse.ArgumentParser(_MODULE, allow_abbrev=False)
    parser.add_argument("--function", required=True)
    parser.add_argument("--cores", type=int)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    sys.argv = [args.script, *args.script_args]
    folder, name = os.getcwd(), args.script
    if not args.module:
        folder, file = os.path.split(os.path.abspath(args.script))
        name = os.path.splitext(file)[0]
    sys.path.insert(0, folder)
    function = getattr(importlib.import_module(name), args.function, None)
    if not callable(function):
        reason = f"{args.script} has no function {args.function!r}; --main_training_function names another"
        parser.exit(2, f"accelerate launch: error: {reason}.\n")
    multiprocessing = importlib.import_module("torch_xla.distributed.xla_multiprocessing")
    multiprocessing.spawn(functools.partial(on_core, function), args=(), nprocs=args.cores)


if __name__ == "__main__":
    main()
