"""The same launch on every machine of a TPU pod, through torch_xla's own launcher where it has one, or through gcloud.

Source: https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm/ssh
"""

import importlib.util
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.runners import program
from accelerate.launch.runners.base import Process
from accelerate.launch.runners.tpu import DEFAULT_FUNCTION

# It went away with torch_xla's older runtime.
_XLA_DIST = "torch_xla.distributed.xla_dist"
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def processes(plan: LaunchPlan, environment: Mapping[str, str]) -> list[Process]:
    """Return the command that starts the launch on every machine of the pod.

    Args:
        plan: what is started.
        environment: the variables of this machine.

    Raises:
        LaunchError: the pod has no name, or an option is malformed.
    """
    program.refuse_elastic(plan, "the launcher on each machine of the pod")
    variables = pod_variables(plan["env"] or ())
    worker = remote_launch(
        {name: resolved.value for name, resolved in plan.settings.items()},
        plan.num_processes,
        plan.script,
        plan.script_args,
    )
    if has_xla_dist():
        words = [sys.executable, "-m", _XLA_DIST, "--restart-tpuvm-pod-server"]
        words += [f"--tpu={plan['tpu_name']}"] if plan["tpu_name"] else []
        words += [f"--vm={name}" for name in plan["vm"] or ()]
        words += [f"--env={name}={value}" for name, value in variables.items()]
        return [Process("torch_xla's launcher", (*words, "--", *worker), environment)]
    sudo, launch = (["sudo"], worker[1:]) if worker[0] == "sudo" else ([], worker)
    assignments = [f"{name}={value}" for name, value in variables.items()]
    remote = shlex.join([*sudo, "env", *assignments, *launch])
    command = gcloud_ssh(plan["tpu_name"], plan["tpu_zone"], remote, workers=_workers(plan["vm"] or ()))
    return [Process("gcloud", tuple(command), environment)]


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Run the launch on every machine of the pod.

    Args:
        plan: what is started.
        environment: the variables of this machine.
        replace: become the program that reaches the machines, where the system can do that.

    Raises:
        LaunchError: as `processes`, or gcloud is not installed.
        subprocess.CalledProcessError: it failed.
    """
    (process,) = processes(plan, environment)
    if process.command[0] == "gcloud":
        program.find("gcloud", environment, "Install the Google Cloud CLI; --dry_run prints the command.")
    program.start(process.command, environment, replace)


def remote_launch(
    options: Mapping[str, object], num_processes: int, script: str, script_args: Sequence[str]
) -> list[str]:
    """Return the command that each machine of a pod runs.

    Args:
        options: the value of each option, by name.
        num_processes: the processes of one machine.
        script: the script.
        script_args: its arguments.
    """
    words = ["sudo"] if options.get("tpu_use_sudo") else []
    words += ["accelerate-launch", "--tpu", "--no_tpu_cluster", "--num_machines", "1"]
    words += ["--mixed_precision", str(options.get("mixed_precision") or "no")]
    words += ["--dynamo_backend", str(options.get("dynamo_backend") or "no").lower()]
    words += ["--num_processes", str(num_processes)]
    words += ["--main_training_function", str(options.get("main_training_function") or DEFAULT_FUNCTION)]
    for name in ("downcast_bf16", "debug", "module"):
        value = options.get(name)
        words += [f"--{name}"] if value and str(value).lower() not in ("no", "false") else []
    return [*words, script, *script_args]


def pod_variables(assignments: Sequence[str]) -> dict[str, str]:
    """Return the variables that are set on the machines of a pod.

    Args:
        assignments: the values of `--env`.

    Raises:
        LaunchError: one is no NAME=VALUE, or would put a secret on a command line.

    Example:
        >>> pod_variables(["A=1"])
        {'ACCELERATE_IN_TPU_POD': '1', 'A': '1'}
    """
    variables = {"ACCELERATE_IN_TPU_POD": "1"}
    for text in assignments:
        match = _ASSIGNMENT.fullmatch(text)
        if match is None:
            raise LaunchError(f"--env is {text.partition('=')[0][:50]!r}; write NAME=VALUE.")
        if not program.may_be_shown(match[1], match[2]):
            raise LaunchError(
                f"--env {match[1]} holds a secret, which would stand on command lines that every user of these machines can read. "
                "Log in on the pod instead, or set it there."
            )
        variables[match[1]] = match[2]
    return variables


def gcloud_ssh(
    name: str | None, zone: str | None, command: str, workers: str = "all", alpha: bool = False
) -> list[str]:
    """Return the call of gcloud that runs a command on the machines of a TPU.

    Args:
        name: the TPU.
        zone: its zone; None leaves it to the configuration of gcloud.
        command: one text, which a shell of each machine reads.
        workers: "all", or numbers separated by commas.
        alpha: use `gcloud alpha`.

    Raises:
        LaunchError: there is no name, or the name or the zone is an option of gcloud.
    """
    if not name:
        raise LaunchError("Which pod? Put tpu_name and tpu_zone into the configuration file (`accelerate config`).")
    for what, text in (("TPU", name), ("zone", zone or "")):
        if text.startswith("-"):
            raise LaunchError(f"{text!r} is no name of a {what}.")
    words = ["gcloud", *(["alpha"] if alpha else []), "compute", "tpus", "tpu-vm", "ssh", name]
    words += ["--zone", zone] if zone else []
    return [*words, "--command", command, "--worker", workers]


def has_xla_dist() -> bool:
    """Tell whether the installed torch_xla brings its own launcher for pods; torch_xla is not imported."""
    spec = importlib.util.find_spec("torch_xla")
    folders = spec.submodule_search_locations if spec else None
    return any(os.path.isfile(pathlib.Path(folder, "distributed", "xla_dist.py")) for folder in folders or ())


def _workers(machines: Sequence[str]) -> str:
    for name in machines:
        if not name.isdigit():
            raise LaunchError(
                f"--vm is {name!r}: gcloud knows the machines of a pod by their numbers, such as --vm 0 --vm 1. Leave the option "
                "out for all of them."
            )
    return ",".join(machines) or "all"
