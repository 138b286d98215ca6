"""A function of a script on each TPU core of this machine, through torch_xla.

`run` starts this very module as a program (`python -m accelerate.launch.runners.tpu`): it imports the script and lets torch_xla
start a process for each core. So the launcher itself needs neither torch nor torch_xla.

Source: https://docs.pytorch.org/xla/master/learn/api-guide.html
"""

import argparse
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate.launch.errors import LaunchError, MissingPackageError
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.runners import program
from accelerate.launch.runners.base import Process

DEFAULT_FUNCTION = "main"
_MODULE = "accelerate.launch.runners.tpu"


def processes(plan: LaunchPlan, environment: Mapping[str, str]) -> list[Process]:
    """Return the program that starts the processes of all cores.

    Args:
        plan: what is started.
        environment: the variables that all processes share.

    Raises:
        LaunchError: an option does not go with TPUs.
    """
    program.refuse_elastic(plan, "torch_xla")
    if plan["no_python"]:
        raise LaunchError("--no_python does not go with --tpu: torch_xla calls a function of a Python script.")
    variables = {**environment, **precision_variables(plan["mixed_precision"], plan["downcast_bf16"])}
    words = [sys.executable, "-m", _MODULE, "--function", plan["main_training_function"] or DEFAULT_FUNCTION]
    # torch_xla takes one core or all of them.
    words += ["--cores", "1"] if plan.num_processes == 1 else []
    words += ["--module"] if plan["module"] else []
    return [Process("torch_xla", (*words, "--", plan.script, *plan.script_args), variables)]


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Run the function on the cores of this machine.

    Args:
        plan: what is started.
        environment: the variables that all processes share.
        replace: become the program that starts the processes, where the system can do that.

    Raises:
        MissingPackageError: torch_xla is not installed.
        LaunchError: an option does not go with TPUs.
        subprocess.CalledProcessError: a process failed.
    """
    (process,) = processes(plan, environment)
    if importlib.util.find_spec("torch_xla") is None:
        raise MissingPackageError(
            "--tpu needs torch_xla, which is not installed: pip install torch_xla, on a machine with a TPU."
        )
    program.start(process.command, process.environment, replace)


def precision_variables(mixed_precision: str | None, downcast: Any) -> dict[str, str]:
    """Return the variables with which torch_xla computes in bfloat16.

    Args:
        mixed_precision: the precision that was asked for.
        downcast: turn float64 into float32 rather than bfloat16; true or a word for it.
    """
    if mixed_precision != "bf16":
        return {}
    return {"XLA_DOWNCAST_BF16" if downcast and str(downcast).lower() not in ("no", "false") else "XLA_USE_BF16": "1"}


def load(script: str, module: bool, function: str) -> Callable[..., Any]:
    """Import a script and return a function of it.

    Args:
        script: a file, or the name of a module.
        module: it is the name of a module.
        function: the name of the function.

    Raises:
        LaunchError: there is no such function.
    """
    if module:
        sys.path.insert(0, os.getcwd())
        name = script
    else:
        folder, name = os.path.split(os.path.abspath(script))
        sys.path.insert(0, folder)
        name = os.path.splitext(name)[0]
    loaded = importlib.import_module(name)
    found = getattr(loaded, function, None)
    if not callable(found):
        raise LaunchError(
            f"{script} has no function {function!r} to run on each core. Define it, or name another with --main_training_function."
        )
    return found


def on_core(function: Callable[..., Any], index: int, *args: Any) -> None:
    """Run the function of a script as the process of one core.

    Args:
        function: the function.
        index: the number of the core.
        args: the arguments of the function.
    """
    os.environ["FORK_LAUNCHED"] = "1"
    function(*args)


def main(arguments: Sequence[str] | None = None) -> None:
    """Import a script and run one of its functions on the cores of this machine.

    Args:
        arguments: the command line; that of this process by default.
    """
    parser = argparse.ArgumentParser(_MODULE, allow_abbrev=False)
    parser.add_argument("--function", required=True)
    parser.add_argument("--cores", type=int, choices=(1,))
    parser.add_argument("--module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    before = sys.argv
    sys.argv = [given.script, *given.script_args]
    try:
        try:
            function = load(given.script, given.module, given.function)
        except LaunchError as error:
            parser.exit(2, f"accelerate launch: error: {error}\n")
        multiprocessing = importlib.import_module("torch_xla.distributed.xla_multiprocessing")
        some = {} if given.cores is None else {"nprocs": given.cores}
        # By the name that other processes import it under: here this module is `__main__`.
        wrapper = importlib.import_module(_MODULE).on_core
        multiprocessing.spawn(functools.partial(wrapper, function), args=(), **some)
    finally:
        sys.argv = before


if __name__ == "__main__":
    main()
