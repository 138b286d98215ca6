"""TPUs: a function of the script on each core of this machine, or the same launch on every machine of a pod.

On one machine torch_xla starts a process for each core. `run` starts this very module as a program
(`python -m accelerate.launch.runners.tpu`), which imports the script; so the launcher itself needs neither torch nor torch_xla.
The machines of a pod are reached through gcloud.

Sources: https://docs.pytorch.org/xla/master/learn/api-guide.html and
https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm/ssh
"""

import argparse
import functools
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate.launch import runners
from accelerate.launch.errors import LaunchError, MissingPackageError
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.runners import Process

_MODULE = "accelerate.launch.runners.tpu"
_FUNCTION = "main"


def process(plan: LaunchPlan, environment: Mapping[str, str]) -> Process:
    """Return the program that starts the processes of all cores, or the command that reaches the machines of the pod."""
    if plan.runner == "tpu_pod":
        runners.refuse_elastic(plan, "the launcher on each machine of the pod")
        worker = remote_launch(plan)
        at = worker.index("accelerate-launch")  # behind sudo
        remote = shlex.join([*worker[:at], "env", *pod_variables(plan["env"] or ()), *worker[at:]])
        command = gcloud_ssh(plan["tpu_name"], plan["tpu_zone"], remote, workers=",".join(plan["vm"] or ["all"]))
        return Process("gcloud", tuple(command), environment)
    runners.refuse_elastic(plan, "torch_xla")
    if plan["no_python"]:
        raise LaunchError("--no_python does not go with --tpu: torch_xla calls a function of a Python script.")
    variables = {**environment, **precision_variables(plan["mixed_precision"], plan["downcast_bf16"])}
    words = [sys.executable, "-m", _MODULE, "--function", plan["main_training_function"] or _FUNCTION]
    # torch_xla takes one core or all of them.
    words += ["--cores", "1"] if plan.num_processes == 1 else []
    words += ["--module"] if plan["module"] else []
    return Process("torch_xla", (*words, "--", plan.script, *plan.script_args), variables)


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Start that program; the launcher may become it."""
    started = process(plan, environment)
    if plan.runner == "tpu_pod":
        runners.require_program("gcloud", environment, "Install the Google Cloud CLI; --dry_run prints the command.")
    elif importlib.util.find_spec("torch_xla") is None:
        raise MissingPackageError("--tpu needs torch_xla: pip install torch_xla, on a machine with a TPU.")
    runners.start(started.command, started.environment, replace)


def precision_variables(mixed_precision: str | None, downcast: Any) -> dict[str, str]:
    """Return the variables with which torch_xla computes in bfloat16; `downcast` turns float64 into float32 beside it."""
    if mixed_precision != "bf16":
        return {}
    return {"XLA_DOWNCAST_BF16" if _is_on(downcast) else "XLA_USE_BF16": "1"}


def _is_on(value: object) -> bool:
    return bool(value) and str(value).lower() not in ("no", "false")


def remote_launch(plan: LaunchPlan) -> list[str]:
    """Return the command that each machine of a pod runs."""
    words = ["sudo"] if plan["tpu_use_sudo"] else []
    words += ["accelerate-launch", "--tpu", "--no_tpu_cluster", "--num_machines", "1"]
    words += ["--mixed_precision", plan["mixed_precision"], "--dynamo_backend", str(plan["dynamo_backend"]).lower()]
    words += ["--num_processes", str(plan.num_processes)]
    words += ["--main_training_function", plan["main_training_function"] or _FUNCTION]
    words += [f"--{name}" for name in ("downcast_bf16", "debug", "module") if _is_on(plan[name])]
    return [*words, plan.script, *plan.script_args]


def pod_variables(assignments: Sequence[str]) -> list[str]:
    """Return the variables of a pod's machines as NAME=VALUE; a LaunchError refuses another form, and secrets."""
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise LaunchError(f"--env is {name[:50]!r}; write NAME=VALUE.")
        if not runners.may_be_shown(name, value):
            raise LaunchError(f"--env {name} holds a secret, which every user of the pod could read. Set it there.")
    return ["ACCELERATE_IN_TPU_POD=1", *assignments]


def gcloud_ssh(
    name: str | None, zone: str | None, command: str, workers: str = "all", alpha: bool = False
) -> list[str]:
    """Return the call of gcloud that runs `command`, which a shell reads, on the `workers` of a TPU.

    Without a zone gcloud's configuration decides. A LaunchError refuses a name or zone that is missing or an option of
    gcloud.
    """
    if not name:
        raise LaunchError("Which pod? Put tpu_name and tpu_zone into the configuration file (`accelerate config`).")
    for what, text in (("TPU", name), ("zone", zone or "")):
        if text.startswith("-"):
            raise LaunchError(f"{text!r} is no name of a {what}.")
    words = ["gcloud", *(["alpha"] if alpha else []), "compute", "tpus", "tpu-vm", "ssh", name]
    words += ["--zone", zone] if zone else []
    return [*words, "--command", command, "--worker", workers]


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
    given = parser.parse_args()
    sys.argv = [given.script, *given.script_args]
    folder, name = os.getcwd(), given.script
    if not given.module:
        folder, file = os.path.split(os.path.abspath(given.script))
        name = os.path.splitext(file)[0]
    sys.path.insert(0, folder)
    function = getattr(importlib.import_module(name), given.function, None)
    if not callable(function):
        reason = f"{given.script} has no function {given.function!r}; --main_training_function names another"
        parser.exit(2, f"accelerate launch: error: {reason}.\n")
    multiprocessing = importlib.import_module("torch_xla.distributed.xla_multiprocessing")
    multiprocessing.spawn(functools.partial(on_core, function), args=(), nprocs=given.cores)


if __name__ == "__main__":
    main()
