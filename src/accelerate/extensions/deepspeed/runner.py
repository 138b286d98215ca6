"""Processes on several machines that DeepSpeed's own launcher starts.

On one machine, and with the launcher "standard", DeepSpeed needs nothing but its variables, and torch's elastic launcher starts
the processes.

Source: https://www.deepspeed.ai/getting-started/#launching-deepspeed-training
"""

import os
import pathlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.base.constants import DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate.config.options import BY_NAME
from accelerate.extensions.deepspeed.options import FIELDS
from accelerate.extensions.machines import launchers
from accelerate.extensions.mpi.host_files import read_hosts
from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import LaunchPlan, Resolved, Source
from accelerate.launch.runners import Process
from accelerate.runtime.ranks import DEFAULT_PORT

BY = "by DeepSpeed's launcher"
_OPTION = "--deepspeed_hostfile"
# Where DeepSpeed looks when no option names a file.
_DEFAULT_HOSTFILE = "/job/hostfile"
# They start one process for each slot of the host file, and refuse a number or a filter.
_BY_SLOTS = ("openmpi", "mpich", "mvapich")
# They pass on the variables listed in a file; the others pass on all.
_BY_FILE = ("pdsh", "openmpi")
# Characters with the same meaning to DeepSpeed, to a shell of the other machine, and to pdsh, which reads `%h`.
_PLAIN = re.compile(r"[\w@+=:,./-]*")


def process(plan: LaunchPlan, environment: Mapping[str, str]) -> Process:
    """Return the command of DeepSpeed's launcher for `run`, after checking its requirements."""
    name = _launcher(plan)
    launchers.refuse_elastic(plan, f"DeepSpeed's launcher {name}", starts_all=name != "nossh")
    path = plan["deepspeed_hostfile"] or _DEFAULT_HOSTFILE
    if not plan["deepspeed_hostfile"] and not os.path.isfile(path):  # DeepSpeed would continue with only this machine
        hint = "or take --deepspeed_multinode_launcher standard, and launch on every machine"
        raise LaunchError(f"There is no host file. Give {_OPTION}, a file of lines such as `node1 slots=8`; {hint}.")
    options = {name: resolved.value for name, resolved in plan.settings.items()}
    options |= {"num_processes": plan.num_processes, "deepspeed_hostfile": path}
    words = command(options, plan.script, plan.script_args)
    hosts = read_hosts(path, _OPTION, repeated=False)  # DeepSpeed refuses them, too
    if name == "nossh" and not plan["main_process_ip"]:
        raise LaunchError(f"--deepspeed_multinode_launcher {name} needs --main_process_ip, the address of machine 0.")
    variables = launchers.without_ranks(environment)
    # DeepSpeed does not hand its --master_addr on to the processes of every launcher.
    variables["MASTER_ADDR"] = str(plan["main_process_ip"] or next(iter(hosts)).rpartition("@")[2])
    variables["MASTER_PORT"] = str(plan["main_process_port"] or DEFAULT_PORT)
    launchers.require_program("deepspeed", variables, "On every machine: pip install 'accelerate[deepspeed]'.")
    return Process("DeepSpeed's launcher", tuple(words), variables)


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Let DeepSpeed's launcher run the processes; this one becomes it where nothing is left to tidy up."""
    call = process(plan, environment)
    if _launcher(plan) not in _BY_FILE:
        runners.start(call.command, call.environment, replace)
        return
    with tempfile.TemporaryDirectory(prefix="accelerate_deepspeed_", ignore_cleanup_errors=True) as private:
        path = os.path.join(private, "variables")
        if held_back := _write_variables(path, call.environment):
            note = "They would be readable there, or changed by a shell: set them there, or in ~/.deepspeed_env."
            runners.print_info(plan, f"not handed on to the other machines: {', '.join(held_back)}. {note}")
        runners.start(call.command, {**call.environment, "DS_ENV_FILE": path})


def _launcher(options: Any) -> str:
    return options["deepspeed_multinode_launcher"] or "pdsh"


def command(options: Mapping[str, Any], script: str, script_args: Sequence[str]) -> list[str]:
    """Return the call of DeepSpeed's launcher for several machines; `options` are values by name."""
    name = _launcher(options)
    check_launcher(name)
    machines, count = options["num_machines"] or 1, options["num_processes"] or 1
    if count % machines:
        raise LaunchError(f"--num_processes is {count}; it must be a multiple of --num_machines, {machines}.")
    include, exclude = options["deepspeed_inclusion_filter"], options["deepspeed_exclusion_filter"]
    if include and exclude:
        raise LaunchError("--deepspeed_inclusion_filter and --deepspeed_exclusion_filter exclude each other.")
    path, address = options["deepspeed_hostfile"], options["main_process_ip"]
    words = ["deepspeed", *(["--hostfile", str(path)] if path else [])]
    if name == "nossh":
        words += ["--node_rank", str(options["machine_rank"] or 0), "--no_ssh", "--no_local_rank"]
    else:
        words += ["--no_local_rank", "--launcher", name]
    if include or exclude:
        words += ["--include" if include else "--exclude", str(include or exclude)]
    elif name not in _BY_SLOTS:
        words += ["--num_gpus", str(count // machines)]
    words += ["--master_addr", str(address)] if address else []
    words += ["--master_port", str(options["main_process_port"] or DEFAULT_PORT)]
    words += [f"--{flag}" for flag in ("module", "no_python") if options[flag]]
    return [*words, script, *script_args]


def starts(values: Mapping[str, Resolved], on: set[str], job: Any) -> bool:
    """Return whether DeepSpeed's launcher starts the processes: on several machines, unless a scheduler or torch's launcher does.

    A scheduler (`job`) that has started this launch on every machine leaves DeepSpeed nothing to log in to.
    """
    launcher = values["deepspeed_multinode_launcher"].value
    if launcher is not None:
        check_launcher(launcher)
    return "machines" in on and launcher != "standard" and not (launcher is None and job)


def check_launcher(name: str) -> None:
    """Refuse a value of `--deepspeed_multinode_launcher` that DeepSpeed does not have."""
    if name not in DEEPSPEED_MULTINODE_LAUNCHERS:
        launchers = ", ".join(DEEPSPEED_MULTINODE_LAUNCHERS)
        raise LaunchError(f"--deepspeed_multinode_launcher is {name!r}; choose one of {launchers}.")


def notes(settings: Mapping[str, Resolved]) -> list[str]:
    """Return a line for each option of the command line that a configuration file of DeepSpeed may override."""
    config = settings["deepspeed_config_file"].value
    if config in (None, "none"):
        return []
    passed = [name for name in FIELDS if settings[name].source is Source.COMMAND_LINE]
    return [f"--{name} counts only where {config} says 'auto': a file's own values hold." for name in passed]


def variables(settings: Mapping[str, Resolved], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a run with DeepSpeed needs besides those of the options, whatever starts it."""
    read = {"mixed_precision", *(name for name in BY_NAME if BY_NAME[name].section == "deepspeed_config")}
    fields = [name for name, resolved in settings.items() if resolved.source is Source.FILE and name in read]
    folders = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = os.pathsep.join(dict.fromkeys([*folders, os.path.abspath(".")]))
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": ",".join(fields), "PYTHONPATH": path}


def _write_variables(path: str, environment: Mapping[str, str]) -> list[str]:
    """Write the file of variables that DeepSpeed passes on, with the user's own lines; return the names held back.

    These are secrets, which would appear on a command line, and values that a shell would change.
    """
    lines, held_back = [], []
    for name in launchers.handed_on(environment):
        if _PLAIN.fullmatch(environment[name]) and launchers.may_be_shown(name, environment[name]):
            lines.append(f"{name}={environment[name]}")
        else:
            held_back.append(name)
    for folder in dict.fromkeys((os.path.expanduser("~"), os.getcwd())):
        user_file = pathlib.Path(folder, environment.get("DS_ENV_FILE") or ".deepspeed_env")
        if user_file.is_file():  # of a variable that comes twice, DeepSpeed takes the last
            lines += filter(str.strip, user_file.read_text(encoding="utf-8").splitlines())
    pathlib.Path(path).write_text("\n".join(lines), encoding="utf-8")
    return held_back
