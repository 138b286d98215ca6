"""A plan as text."""

import os
import shlex
from collections.abc import Mapping

from accelerate.base.table import table
from accelerate.config.options import BY_NAME
from accelerate.launch import runners
from accelerate.launch.plan import LaunchPlan, Resolved, Source
from accelerate.launch.runners import Process
from accelerate.launch.secrets import command, masked


def show(plan: LaunchPlan, environ: Mapping[str, str] | None = None) -> str:
    """Return what would be started, the source of each setting, and the command and variables of each process.

    `environ` are the variables of the shell, by default those of this process.
    """
    environ = os.environ if environ is None else environ
    runner = runners.module_for(plan)
    count = getattr(runner, "summary", _summary)(plan)
    lines = [f"{count} would be started {runner.BY}.", *_rendezvous(plan)]
    lines += ["", settings_table(plan.settings), ""]
    lines += _process(plan, runners.process(plan), environ)
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def _summary(plan: LaunchPlan) -> str:
    """Return how many processes of a plan run on what, in words."""
    where = "the CPU" if plan.on_cpu else f"{plan.hardware.device} devices"
    # A scheduler has started a launch for each process.
    is_one_of_them = plan.runner == "single" and plan.num_processes > 1
    count = f"1 of {plan.num_processes}" if is_one_of_them else plan.num_processes
    return f"{count} {'process' if plan.num_processes == 1 else 'processes'} on {where}"


def _rendezvous(plan: LaunchPlan) -> list[str]:
    if not plan.elastic:
        return []
    meet = plan.rendezvous
    lines = [f"They meet at {meet.host}, port {meet.port or 'chosen by the system'} ({meet.backend})."]
    if meet.machines > 1:
        number = "takes its number when they meet" if meet.machine is None else f"is machine {meet.machine}"
        lines.append(f"{meet.machines} machines take part, {plan.local_processes} processes each; this one {number}.")
    return lines


def settings_table(settings: Mapping[str, Resolved], every: bool = False) -> str:
    """Return the settings that are set and those that every rank receives, or all, and where each comes from, as a table."""
    rows = []
    for name, resolved in settings.items():
        option = BY_NAME[name]
        received = option.feature is None and option.encode(resolved.value)
        if every or resolved.source is not Source.DEFAULT or received:
            value = masked(resolved.value, name)
            rows.append((name, "yes" if value is True else "no" if value is False else str(value), resolved.origin))
    own = {name for name, _, _ in rows}
    if "use_deepspeed" in own and not own & {"zero_stage", "deepspeed_config_file"}:
        rows.append(("zero_stage", "2", "default"))  # of DeepSpeedPlugin
    return table(["SETTING", "VALUE", "SOURCE"], rows)


def _process(plan: LaunchPlan, started: Process, environ: Mapping[str, str]) -> list[str]:
    """Return the command of a process, and what its variables have next to those of this shell."""
    first, *others = started.command
    called = f"{first}({', '.join(others)})" if started.is_call else shlex.join(command(started.command))
    own = sorted(set(started.environment.items()) - set(environ.items()))
    gone = sorted(set(environ) - set(started.environment))
    lines = [f"{started.label}: {called}"]
    lines += [f"  {name}={shlex.quote(str(masked(value, name)))}" for name, value in own]
    lines += ["  and its rank and size, and where they meet, as torchrun spells them"] if plan.elastic else []
    return [*lines, f"  without {', '.join(gone)}"] if gone and not started.is_call else lines
