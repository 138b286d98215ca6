"""TPU pods: the same launch on each machine of a pod, which is reached through gcloud.

Source: https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm/ssh
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.extensions.machines import launchers
from accelerate.extensions.tpu.cores import MAIN_FUNCTION, is_on
from accelerate.extensions.tpu.cores import summary as summary
from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import LaunchPlan, Resolved
from accelerate.launch.runners import Process

BY = "by the machines of a TPU pod"
REMOTE = True


def starts(values: Mapping[str, Resolved], on: set[str], job: Any) -> bool:
    """Return whether the TPU is a pod."""
    return bool(values["tpu_use_cluster"].value)


def process(plan: LaunchPlan, environment: Mapping[str, str]) -> Process:
    """Return the command that reaches the machines of the pod."""
    launchers.refuse_elastic(plan, "the launcher on each machine of the pod")
    worker = remote_launch(plan)
    at = worker.index("accelerate-launch")  # behind sudo
    remote = shlex.join([*worker[:at], "env", *pod_variables(plan["env"] or ()), *worker[at:]])
    command = gcloud_ssh(plan["tpu_name"], plan["tpu_zone"], remote, workers=",".join(plan["vm"] or ["all"]))
    return Process("gcloud", tuple(command), environment)


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Run that command; the launcher may become it."""
    started = process(plan, environment)
    launchers.require_program("gcloud", environment, "Install the Google Cloud CLI; --dry_run prints the command.")
    runners.start(started.command, started.environment, replace)


def remote_launch(plan: LaunchPlan) -> list[str]:
    """Return the command that each machine of a pod runs."""
    words = ["sudo"] if plan["tpu_use_sudo"] else []
    words += ["accelerate-launch", "--tpu", "--no_tpu_cluster", "--num_machines", "1"]
    words += ["--mixed_precision", plan["mixed_precision"], "--dynamo_backend", str(plan["dynamo_backend"]).lower()]
    words += ["--num_processes", str(plan.num_processes)]
    words += ["--main_training_function", plan["main_training_function"] or MAIN_FUNCTION]
    words += [f"--{name}" for name in ("downcast_bf16", "debug", "module") if is_on(plan[name])]
    return [*words, plan.script, *plan.script_args]


def pod_variables(assignments: Sequence[str]) -> list[str]:
    """Return the variables of a pod's machines as NAME=VALUE; a LaunchError refuses another form, and secrets."""
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise LaunchError(f"--env is {name[:50]!r}; write NAME=VALUE.")
        if not launchers.may_be_shown(name, value):
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
