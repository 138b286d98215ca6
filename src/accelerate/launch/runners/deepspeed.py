"""Processes on several machines that DeepSpeed's own launcher starts.

On one machine, and with the launcher "standard", DeepSpeed needs nothing but its variables, and torch's elastic launcher starts
the processes.

Source: https://www.deepspeed.ai/getting-started/#launching-deepspeed-training
"""

import contextlib
import importlib.util
import os
import pathlib
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accelerate.config.options import BY_NAME
from accelerate.launch import config_file, runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import LaunchPlan, Resolved, Source
from accelerate.launch.runners import Process, mpi, program
from accelerate.runtime.ranks import DEFAULT_PORT
from accelerate.utils.constants import DEEPSPEED_MULTINODE_LAUNCHERS

_OPTION = "--deepspeed_hostfile"
# Where DeepSpeed looks when no option names a file.
_DEFAULT_HOSTFILE = "/job/hostfile"
# Variables that DeepSpeed hands on by itself, with values of its own.
_OF_DEEPSPEED = ("MLFLOW", "PYTHON", "MV2", "UCX")
# What DeepSpeed puts between quotes.
_QUOTED = re.compile(r"[^\w@%+=:,./-]")


# Which program DeepSpeed asks for.
_PROGRAMS = {"pdsh": "pdsh", "openmpi": "ompi_info", "mpich": "mpirun", "mvapich": "mpiname", "slurm": "sinfo"}
# They start one process for each slot of the host file, and refuse a number or a filter.
_BY_SLOTS = ("openmpi", "mpich", "mvapich")
# Their processes find each other by variables; DeepSpeed does not hand its --master_addr on to them.
_BY_VARIABLES = ("openmpi", "mvapich", "slurm")


def processes(plan: LaunchPlan, environment: Mapping[str, str]) -> list[Process]:
    """Return the call of DeepSpeed's launcher that `run` makes, once what it needs is checked."""
    program.refuse_elastic(plan, "DeepSpeed's launcher")
    name, path = plan["deepspeed_multinode_launcher"] or "pdsh", plan["deepspeed_hostfile"]
    if not path:
        if not os.path.isfile(_DEFAULT_HOSTFILE):  # DeepSpeed itself would go on with this machine alone
            raise LaunchError(
                f"--num_machines is {plan['num_machines']}, and no host file names the machines. Give {_OPTION}, a file of lines such "
                "as `node1 slots=8`; or --deepspeed_multinode_launcher standard, and launch on every machine."
            )
        path = _DEFAULT_HOSTFILE
    options = {name: resolved.value for name, resolved in plan.settings.items()}
    options |= {"num_processes": plan.num_processes, "deepspeed_hostfile": path}
    hosts, style = mpi.read_hosts(path, _OPTION, repeats=False)
    variables = program.own(environment)
    if name in _BY_VARIABLES:
        variables["MASTER_ADDR"] = str(plan["main_process_ip"] or hosts[0].address)
        variables["MASTER_PORT"] = str(plan["main_process_port"] or DEFAULT_PORT)
    # Open MPI hands on what is named; the others hand on all, or read a file.
    handed_on = program.handed_on(variables) if name == "openmpi" else []
    exported = [word for variable in handed_on if not variable.startswith(_OF_DEEPSPEED) for word in ("-x", variable)]
    arguments = _for_remote_shell(plan.script_args) if name == "pdsh" else plan.script_args
    words = command(options, plan.script, arguments, exported)
    _check_hosts(hosts, style, options, name)
    _check_options(options, name)
    if importlib.util.find_spec("deepspeed") is None:
        raise LaunchError("DeepSpeed is not installed: pip install 'accelerate[deepspeed]', on every machine.")
    program.find("deepspeed", variables, "It comes with DeepSpeed; is the environment's bin folder missing there?")
    if name in _PROGRAMS:
        otherwise = f"--deepspeed_multinode_launcher {name} needs it; install it, or choose another."
        program.find(_PROGRAMS[name], variables, otherwise)
    return [Process("DeepSpeed's launcher", tuple(words), variables)]


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Let DeepSpeed's launcher run the processes; this one becomes it where nothing is left to tidy up."""
    (process,) = processes(plan, environment)
    if (plan["deepspeed_multinode_launcher"] or "pdsh") != "pdsh":
        program.start(process.command, process.environment, replace)
        return
    with _variables_file(process.environment) as (path, held_back):
        if held_back:
            runners.tell(
                plan,
                f"not handed on to the other machines: {', '.join(held_back)}. pdsh would show their values to every user there, or "
                "cannot carry them; set them there, or in ~/.deepspeed_env.",
            )
        program.start(process.command, {**process.environment, "DS_ENV_FILE": path})


def command(
    options: Mapping[str, Any], script: str, script_args: Sequence[str], launcher_args: Sequence[str] = ()
) -> list[str]:
    """Return the call of DeepSpeed's launcher for several machines.

    Args:
        options: the value of each option, by name.
        script: the script.
        script_args: its arguments.
        launcher_args: arguments of the program that DeepSpeed calls.

    Raises:
        LaunchError: the launcher is unknown, two filters contradict each other, or the processes do not divide evenly.
    """
    name = options.get("deepspeed_multinode_launcher") or "pdsh"
    check_launcher(name)
    machines, count = options.get("num_machines") or 1, options.get("num_processes") or 1
    if count % machines:
        raise LaunchError(f"--num_processes is {count}; it must be a multiple of --num_machines, {machines}.")
    include, exclude = options.get("deepspeed_inclusion_filter"), options.get("deepspeed_exclusion_filter")
    if include and exclude:
        raise LaunchError(
            "--deepspeed_inclusion_filter and --deepspeed_exclusion_filter exclude each other. Choose one."
        )
    words = ["deepspeed"]
    if options.get("deepspeed_hostfile"):
        words += ["--hostfile", str(options["deepspeed_hostfile"])]
    if name == "nossh":
        words += ["--node_rank", str(options.get("machine_rank") or 0), "--no_ssh", "--no_local_rank"]
    else:
        words += ["--no_local_rank", "--launcher", name]
    if include or exclude:
        words += ["--include" if include else "--exclude", str(include or exclude)]
    elif name not in _BY_SLOTS:
        words += ["--num_gpus", str(count // machines)]
    if options.get("main_process_ip"):
        words += ["--master_addr", str(options["main_process_ip"])]
    words += ["--master_port", str(options.get("main_process_port") or DEFAULT_PORT)]
    if launcher_args:
        words += ["--launcher_args", shlex.join(launcher_args)]
    if options.get("module"):
        words.append("--module")
    elif options.get("no_python"):
        words.append("--no_python")
    return [*words, script, *script_args]


def check_launcher(name: str) -> None:
    """Refuse a value of `--deepspeed_multinode_launcher` that DeepSpeed does not have; the error suggests the nearest one."""
    if name not in DEEPSPEED_MULTINODE_LAUNCHERS:
        near = config_file.nearest(name, DEEPSPEED_MULTINODE_LAUNCHERS)
        hint = f"did you mean {near}?" if near else f"choose one of {', '.join(DEEPSPEED_MULTINODE_LAUNCHERS)}."
        raise LaunchError(f"--deepspeed_multinode_launcher is {name!r}; {hint}")


def exports(settings: Mapping[str, Resolved], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a run with DeepSpeed needs beside those of the options, whatever starts it.

    Args:
        settings: option name to resolved value.
        environment: the variables it would have otherwise.
    """
    fields = [
        name
        for name, resolved in settings.items()
        if resolved.source is Source.FILE
        and (name == "mixed_precision" or (name in BY_NAME and BY_NAME[name].section == "deepspeed_config"))
    ]
    folders = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = os.pathsep.join(dict.fromkeys([*folders, os.path.abspath(".")]))
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": ",".join(fields), "PYTHONPATH": path}


@contextlib.contextmanager
def _variables_file(environment: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Write the file from which DeepSpeed hands variables on to other machines, and remove it afterwards.

    It lies in a private folder. The user's own `.deepspeed_env` files, in the home and the working directory, are read into it
    and stay as they are.

    Yields:
        The path of the file, for `DS_ENV_FILE`, and the names of the variables that are not in it: secrets, which would
        stand on a command line, and values that are no plain line.
    """
    lines, held_back = [], []
    for name in program.handed_on(environment):
        value = environment[name]
        if not program.may_be_shown(name, value) or value.splitlines() not in ([], [value]) or value != value.strip():
            held_back.append(name)
        elif not name.startswith(_OF_DEEPSPEED) and name != "DS_ENV_FILE":
            lines.append(f"{name}={_for_export(value)}")
    for folder in dict.fromkeys((os.path.expanduser("~"), os.getcwd())):
        path = pathlib.Path(folder, environment.get("DS_ENV_FILE") or ".deepspeed_env")
        given = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for line in filter(str.strip, given):
            name, equals, _ = line.partition("=")
            if not equals:
                raise LaunchError(f"{path} holds {line[:50]!r}; DeepSpeed reads lines such as NAME=value from it.")
            held_back = [other for other in held_back if other != name.strip()]
            lines.append(line)
    with tempfile.TemporaryDirectory(prefix="accelerate_deepspeed_", ignore_cleanup_errors=True) as private:
        path = pathlib.Path(private, "variables")
        path.touch(mode=0o600)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        yield str(path), held_back


def _for_export(value: str) -> str:
    # DeepSpeed puts double quotes around what is not plain, and a shell of the other machine reads that; pdsh reads `%h`.
    if _QUOTED.search(value):
        value = re.sub(r'([\\"$`])', r"\\\1", value)
    return value.replace("%", "%%")


def _for_remote_shell(arguments: Sequence[str]) -> tuple[str, ...]:
    # A shell of the other machine reads the arguments, too. DeepSpeed quotes those with a blank, and only against blanks and
    # double quotes; the rest it leaves as they are.
    quoted = (re.sub(r"([\\$`])", r"\\\1", word) if " " in word else shlex.quote(word) for word in arguments)
    return tuple(word.replace("%", "%%") for word in quoted)


def _check_hosts(hosts: Sequence[mpi.Host], style: str, options: Mapping[str, Any], launcher: str) -> None:
    """Refuse a host file, filters and numbers that do not agree; DeepSpeed would start other processes than were asked for."""
    count, machines, path = options["num_processes"], options["num_machines"] or 1, options["deepspeed_hostfile"]
    for host in hosts:
        if host.slots is None or style != "slots":
            raise LaunchError(
                f"{host.name} in {path} ({_OPTION}) has no slots. DeepSpeed wants `{host.name} slots=N`."
            )
    slots = {(host.name, str(slot)) for host in hosts for slot in range(host.slots)}
    each, by_slots = count // machines, launcher in _BY_SLOTS
    include, exclude = options["deepspeed_inclusion_filter"], options["deepspeed_exclusion_filter"]
    if by_slots and (include or exclude):
        raise LaunchError(
            f"--deepspeed_multinode_launcher {launcher} takes all slots of the host file: filters do not work with it. Write a host "
            "file of what is to be used."
        )
    if include or exclude:
        named = _named(slots, str(include or exclude))
        slots = named if include else slots - named
    left = Counter(host for host, _ in sorted(slots))
    started = left.values() if include or exclude or by_slots else [min(number, each) for number in left.values()]
    if len(left) != machines or sum(started) != count or (by_slots and {*started} != {each}):
        raise LaunchError(
            f"--num_processes is {count} and --num_machines is {machines}, and DeepSpeed gets these slots of {path} ({_OPTION}): "
            f"{', '.join(f'{host} has {number}' for host, number in left.items()) or 'none'}. Make them agree."
        )


def _named(slots: set[tuple[str, str]], text: str) -> set[tuple[str, str]]:
    """Return the machines and slots that a filter names."""
    named = set()
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        found = {slot for slot in slots if slot[0] == host}
        if colon:
            found = {(host, number) for number in numbers.split(",")}
        if not found or not found <= slots:
            raise LaunchError(
                f"The filter {text!r} holds {part!r}, which is no machine or slot of {_OPTION}. Write host or host:0,1, and @ "
                "between two of them."
            )
        named |= found
    return named


def _check_options(options: Mapping[str, Any], launcher: str) -> None:
    rank, machines = options["machine_rank"] or 0, options["num_machines"] or 1
    if launcher == "nossh":
        if not options["main_process_ip"]:
            raise LaunchError(
                "--deepspeed_multinode_launcher nossh needs --main_process_ip, the address of machine 0."
            )
        if not 0 <= rank < machines:
            raise LaunchError(f"--machine_rank is {rank}; it goes from 0 to {machines - 1}.")
    elif rank:
        raise LaunchError(
            f"--machine_rank is {rank}: {launcher} starts the processes of all machines. Launch on machine 0 only; or choose "
            "standard or nossh, and launch on every machine."
        )
    if launcher == "slurm" and (options["module"] or options["no_python"]):
        raise LaunchError("--deepspeed_multinode_launcher slurm starts scripts only, not --module or --no_python.")
