"""What a plan would start, as text: `accelerate launch --dry-run`."""

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence

from accelerate.config.options import BY_NAME
from accelerate.launch import runners
from accelerate.launch.plan import LaunchPlan, Source
from accelerate.launch.secrets import shown
from accelerate.launch.tables import table


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
    where = "the CPU" if plan.on_cpu else f"{plan.hardware.device} devices"
    noun = "process" if plan.num_processes == 1 else "processes"
    lines = [
        f"{plan.num_processes} {noun} on {where} would be started {runners.RUNNERS[plan.runner]}.",
        *_meeting(plan),
    ]
    lines += ["", table(["SETTING", "VALUE", "SOURCE"], _settings(plan)), ""]
    lines += _processes(runners.processes(plan), environ)
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


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
    """Return the settings that somebody has set, and those that every worker is told."""
    rows = []
    for name, resolved in plan.settings.items():
        option = BY_NAME[name]
        told = option.feature is None and option.encode(resolved.value)
        if resolved.source is not Source.DEFAULT or told:
            value = shown(
                name, "yes" if resolved.value is True else "no" if resolved.value is False else str(resolved.value)
            )
            rows.append((name, value, resolved.origin))
    return rows


def _processes(started: Sequence[runners.Process], environ: Mapping[str, str]) -> list[str]:
    own = [
        {name: value for name, value in process.environment.items() if environ.get(name) != value}
        for process in started
    ]
    common = (
        {name: value for name, value in own[0].items() if all(other.get(name) == value for other in own)}
        if own
        else {}
    )
    lines = []
    if len(started) > 1 and common:
        lines += ["Each of them gets these variables, and those of this shell:", *_variables(common), ""]
    for process, variables in zip(started, own, strict=True):
        lines.append(f"{process.label}: {shlex.join(process.command)}")
        lines += _variables(
            variables if len(started) == 1 else {k: v for k, v in variables.items() if k not in common}
        )
        gone = sorted(set(environ) - set(process.environment))
        lines += [f"  without {', '.join(gone)}"] if gone else []
    return lines


def _variables(variables: Mapping[str, str]) -> Iterable[str]:
    return [f"  {name}={shlex.quote(shown(name, value))}" for name, value in sorted(variables.items())]
