"""What a plan would start, as text: `accelerate launch --dry-run`."""

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence

from accelerate.config.options import BY_NAME
from accelerate.diagnostics.table import table
from accelerate.launch import runners, secrets
from accelerate.launch.plan import LaunchPlan, Source
from accelerate.launch.secrets import masked


def describe(plan: LaunchPlan, environ: Mapping[str, str] | None = None) -> str:
    """Return what would be started, where each setting comes from, and the command and variables of each process.

    Args:
        plan: what `accelerate.launch.resolve.resolve` decided.
        environ: the variables that the launcher was started with, which its processes inherit; those of this process by default.

    Example:
        >>> from accelerate.commands.launch import launch_command_parser
        >>> from accelerate.launch.resolve import resolve
        >>> plan = resolve(launch_command_parser().parse_args(["--cpu", "--num_processes", "2", "-m", "timeit"]))
        >>> print(describe(plan).splitlines()[0])
        2 processes on the CPU would be started by torch's elastic launcher on this machine.
    """
    environ = os.environ if environ is None else environ
    lines = [f"{summary(plan)} would be started {runners.RUNNERS[plan.runner]}.", *_meeting(plan)]
    lines += ["", table(["SETTING", "VALUE", "SOURCE"], _settings(plan)), ""]
    lines += _processes(plan, runners.processes(plan), environ)
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def summary(plan: LaunchPlan) -> str:
    """Return how many processes of a plan run on what, in words.

    Args:
        plan: what is started.
    """
    if plan.runner == "sagemaker":  # its instances decide
        return "The processes"
    where = "the CPU" if plan.on_cpu else f"{plan.hardware.device} devices"
    if plan.runner in ("tpu", "tpu_pod"):
        where = "TPU cores"
    # A scheduler has started a launch for each process.
    count = f"1 of {plan.num_processes}" if plan.runner == "single" and plan.num_processes > 1 else plan.num_processes
    return f"{count} {'process' if plan.num_processes == 1 else 'processes'} on {where}"


def _meeting(plan: LaunchPlan) -> list[str]:
    if not plan.elastic:
        return []
    meet, here = plan.rendezvous, plan.machines
    lines = [f"They meet at {meet.host}, port {meet.port or 'chosen by the system'} ({meet.backend})."]
    if here.count > 1:
        number = "takes its number when they meet" if here.rank is None else f"is machine {here.rank}"
        lines.append(f"{here.count} machines take part, {plan.local_processes} processes each; this one {number}.")
    return lines


def _settings(plan: LaunchPlan) -> list[tuple[str, str, str]]:
    """Return the settings that are not defaults, and those that every rank receives."""
    rows = []
    for name, resolved in plan.settings.items():
        option = BY_NAME[name]
        received = option.feature is None and option.encode(resolved.value)
        if resolved.source is not Source.DEFAULT or received:
            value = masked(resolved.value, name)
            rows.append((name, "yes" if value is True else "no" if value is False else str(value), resolved.origin))
    return rows


def _processes(plan: LaunchPlan, started: Sequence[runners.Process], environ: Mapping[str, str]) -> list[str]:
    own = [set(process.environment.items()) - set(environ.items()) for process in started]
    common = set.intersection(*own) if len(own) > 1 else set()
    lines = []
    if common:
        lines += ["Each of them gets these variables, and those of this shell:", *_variables(common), ""]
    for process, variables in zip(started, own, strict=True):
        lines.append(f"{process.label}: {_written(plan, process.command)}")
        lines += _variables(variables - common)
        gone = [] if plan.runner == "sagemaker" else sorted(set(environ) - set(process.environment))
        lines += [f"  without {', '.join(gone)}"] if gone else []
    return lines


def _written(plan: LaunchPlan, words: Sequence[str]) -> str:
    if plan.runner == "sagemaker":  # a call in Python
        return f"{words[0]}({', '.join(words[1:])})"
    return shlex.join(secrets.command(words))


def _variables(variables: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {name}={shlex.quote(str(masked(value, name)))}" for name, value in sorted(variables)]
