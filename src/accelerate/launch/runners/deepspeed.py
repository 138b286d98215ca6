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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accelerate.config.options import BY_NAME
from accelerate.launch import config_file
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import LaunchPlan, Resolved, Source
from accelerate.launch.runners import hostfile, program
from accelerate.launch.runners.base import Process
from accelerate.runtime.ranks import DEFAULT_PORT
from accelerate.utils.constants import DEEPSPEED_MULTINODE_LAUNCHERS

_OPTION = "--deepspeed_hostfile"
# Where DeepSpeed looks when nobody names a file.
_DEFAULT_HOSTFILE = "/job/hostfile"
# They start one process for each slot of the host file, and refuse to be given fewer.
_BY_SLOTS = ("openmpi", "mpich", "mvapich")
# The program whose presence DeepSpeed asks for.
_PROGRAMS = {"pdsh": "pdsh", "openmpi": "ompi_info", "mpich": "mpirun", "mvapich": "mpiname", "slurm": "sinfo"}
# Variables that DeepSpeed hands on by itself, with values of its own.
_OF_DEEPSPEED = ("MLFLOW", "PYTHON", "MV2", "UCX")
# What DeepSpeed puts between quotes.
_QUOTED = re.compile(r"[^\w@%+=:,./-]")


def processes(plan: LaunchPlan, environment: Mapping[str, str]) -> list[Process]:
    """Return the call of DeepSpeed's launcher that `run` makes.

    Args:
        plan: what is started.
        environment: the variables that all processes share.

    Raises:
        LaunchError: DeepSpeed or the program that it needs is missing, or the host file or a filter is wrong.
    """
    launcher = plan["deepspeed_multinode_launcher"] or "pdsh"
    check_launcher(launcher)
    program.refuse_elastic(plan, "DeepSpeed's launcher")
    options = {name: resolved.value for name, resolved in plan.settings.items()}
    options["num_processes"] = plan.num_processes
    options["deepspeed_hostfile"] = _hostfile(options)
    variables = program.own({**environment, **exports(plan.settings, environment)})
    if launcher in ("openmpi", "mvapich", "slurm"):
        variables |= _meeting_point(options)  # DeepSpeed tells these nothing of its --master_addr
    arguments = _for_remote_shell(plan.script_args) if launcher == "pdsh" else plan.script_args
    words = command(options, plan.script, arguments, _launcher_arguments(launcher, variables))
    _check_machines(options, launcher)
    _check_installed(launcher, variables)
    return [Process("DeepSpeed's launcher", tuple(words), variables)]


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Let DeepSpeed's launcher run the processes of a plan.

    Args:
        plan: what is started.
        environment: the variables that all processes share.
        replace: become the launcher, where the system can do that and nothing is left to tidy up.

    Raises:
        LaunchError: as `processes`.
        subprocess.CalledProcessError: it failed.
    """
    (process,) = processes(plan, environment)
    if (plan["deepspeed_multinode_launcher"] or "pdsh") != "pdsh":
        program.start(process.command, process.environment, replace)
        return
    with variables_file(process.environment) as (path, held_back):
        if held_back:
            from accelerate.launch.runners import tell

            tell(
                plan,
                f"not handed on to the other machines: {', '.join(held_back)}. pdsh would show their values to every user there, or "
                "cannot carry them; set them there, or in ~/.deepspeed_env.",
            )
        program.start(process.command, {**process.environment, "DS_ENV_FILE": path}, replace=False)


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
    launcher = options.get("deepspeed_multinode_launcher") or "pdsh"
    check_launcher(launcher)
    machines, count = options.get("num_machines") or 1, options.get("num_processes") or 1
    if count % machines:
        raise LaunchError(f"--num_processes is {count}; it must be a multiple of --num_machines, {machines}.")
    words = ["deepspeed"]
    if options.get("deepspeed_hostfile"):
        words += ["--hostfile", str(options["deepspeed_hostfile"])]
    if launcher == "nossh":
        words += ["--node_rank", str(options.get("machine_rank") or 0), "--no_ssh", "--no_local_rank"]
    else:
        words += ["--no_local_rank", "--launcher", launcher]
    include, exclude = options.get("deepspeed_inclusion_filter"), options.get("deepspeed_exclusion_filter")
    if include and exclude:
        raise LaunchError(
            "--deepspeed_inclusion_filter and --deepspeed_exclusion_filter exclude each other. Choose one."
        )
    if exclude:
        words += ["--exclude", str(exclude)]
    elif include:
        words += ["--include", str(include)]
    elif launcher not in _BY_SLOTS:
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
    """Refuse a launcher that DeepSpeed does not have.

    Args:
        name: the value of `--deepspeed_multinode_launcher`.

    Raises:
        LaunchError: it is unknown; the message suggests the nearest one.
    """
    if name not in DEEPSPEED_MULTINODE_LAUNCHERS:
        near = config_file.nearest(name, DEEPSPEED_MULTINODE_LAUNCHERS)
        hint = f"did you mean {near}?" if near else f"choose one of {', '.join(DEEPSPEED_MULTINODE_LAUNCHERS)}."
        raise LaunchError(f"--deepspeed_multinode_launcher is {name!r}; {hint}")


def exports(settings: Mapping[str, Resolved], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a run with DeepSpeed needs beside those of the options, whoever starts it.

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
def variables_file(environment: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Write the file from which DeepSpeed hands variables on to other machines, and remove it afterwards.

    It lies in a private folder, and the user's own `.deepspeed_env` files, in the home and the working directory, are read
    into it and stay as they are.

    Args:
        environment: the variables of the run.

    Yields:
        The path of the file, for `DS_ENV_FILE`, and the names of the variables that are not in it: secrets, which would
        stand on a command line, and values of several lines.
    """
    lines, held_back = [], []
    for name in program.handed_on(environment):
        value = environment[name]
        if not program.may_be_shown(name, value) or "\n" in value or "\r" in value or value != value.strip():
            held_back.append(name)
        elif not name.startswith(_OF_DEEPSPEED) and name != "DS_ENV_FILE":
            lines.append(f"{name}={_for_export(value)}")
    own_name = environment.get("DS_ENV_FILE") or ".deepspeed_env"
    given = set()
    for folder in dict.fromkeys((os.path.expanduser("~"), os.getcwd())):
        path = pathlib.Path(folder, own_name)
        if path.is_file():
            mine = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            for line in mine:
                if "=" not in line:
                    raise LaunchError(f"{path} holds {line[:50]!r}; DeepSpeed reads lines such as NAME=value from it.")
            given |= {line.partition("=")[0].strip() for line in mine}
            lines += mine
    with tempfile.TemporaryDirectory(prefix="accelerate_deepspeed_", ignore_cleanup_errors=True) as place:
        path = pathlib.Path(place, "variables")
        path.touch(mode=0o600)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        yield str(path), [name for name in held_back if name not in given]


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


def _launcher_arguments(launcher: str, environment: Mapping[str, str]) -> list[str]:
    """Return how Open MPI learns which variables to hand on; the other programs hand on all, or read a file."""
    if launcher != "openmpi":
        return []
    names = [name for name in program.handed_on(environment) if not name.startswith(_OF_DEEPSPEED)]
    return [word for name in names for word in ("-x", name)]


def _meeting_point(options: Mapping[str, Any]) -> dict[str, str]:
    first = hostfile.read(options["deepspeed_hostfile"], _OPTION, repeats=False).hosts[0].address
    port = options.get("main_process_port") or DEFAULT_PORT
    return {"MASTER_ADDR": str(options.get("main_process_ip") or first), "MASTER_PORT": str(port)}


def _hostfile(options: Mapping[str, Any]) -> str:
    path = options.get("deepspeed_hostfile")
    if path:
        return str(path)
    if os.path.isfile(_DEFAULT_HOSTFILE):
        return _DEFAULT_HOSTFILE
    # DeepSpeed itself would go on with this machine alone.
    raise LaunchError(
        f"--num_machines is {options['num_machines']}, and nobody names the machines. Give {_OPTION}, a file of lines such as "
        "`node1 slots=8`; or --deepspeed_multinode_launcher standard, and launch on every machine."
    )


def _check_machines(options: Mapping[str, Any], launcher: str) -> None:
    file = hostfile.read(options["deepspeed_hostfile"], _OPTION, repeats=False)
    for host in file.hosts:
        if host.slots is None or file.style != "slots":
            raise LaunchError(
                f"{host.name} in {file.path} ({_OPTION}) has no slots. DeepSpeed wants `{host.name} slots=N`."
            )
    count, machines = options["num_processes"], options["num_machines"] or 1
    include, exclude = options.get("deepspeed_inclusion_filter"), options.get("deepspeed_exclusion_filter")
    active = {host.name: list(range(host.slots or 0)) for host in file.hosts}
    if include or exclude:
        if launcher in _BY_SLOTS:
            raise LaunchError(
                f"--deepspeed_multinode_launcher {launcher} takes all slots of the host file: filters do not work with it. Write a "
                "host file of what is to be used."
            )
        active = _filtered(active, str(include or exclude), bool(include))
        if (have := sum(map(len, active.values()))) != count:
            raise LaunchError(f"--num_processes is {count}, and the filter leaves {have} slots. Make them agree.")
    if len(active) != machines:
        raise LaunchError(
            f"--num_machines is {machines}, and {len(active)} machines are left of {file.path} ({_OPTION}). Make them agree."
        )
    if not (include or exclude):
        _check_slots(active, count // machines, launcher, file.path)
    if launcher == "nossh" and not options.get("main_process_ip"):
        raise LaunchError("--deepspeed_multinode_launcher nossh needs --main_process_ip, the address of machine 0.")
    if launcher == "nossh" and not 0 <= (options.get("machine_rank") or 0) < machines:
        raise LaunchError(f"--machine_rank is {options['machine_rank']}; it goes from 0 to {machines - 1}.")
    if launcher != "nossh" and options.get("machine_rank"):
        raise LaunchError(
            f"--machine_rank is {options['machine_rank']}: {launcher} starts the processes of all machines. Launch on machine 0 "
            "only; or choose standard or nossh, and launch on every machine."
        )
    if launcher == "slurm" and (options.get("module") or options.get("no_python")):
        raise LaunchError("--deepspeed_multinode_launcher slurm starts scripts only, not --module or --no_python.")


def _check_slots(active: Mapping[str, list[int]], each: int, launcher: str, path: str) -> None:
    for name, slots in active.items():
        if len(slots) < each or (launcher in _BY_SLOTS and len(slots) != each):
            raise LaunchError(
                f"{name} has {len(slots)} slots in {path} ({_OPTION}), and each machine gets {each} processes (--num_processes by "
                "--num_machines). Make them agree."
            )


def _filtered(active: Mapping[str, list[int]], text: str, include: bool) -> dict[str, list[int]]:
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, colon, slots = part.partition(":")
        if name not in active:
            raise LaunchError(
                f"The filter {text!r} names {name!r}, which is not in {_OPTION}. It is written host[:slot,slot]@host."
            )
        try:
            chosen = [int(slot) for slot in slots.split(",")] if colon else active[name]
        except ValueError:
            raise LaunchError(f"The filter {text!r} holds {part!r}; write host:0,1 or host.") from None
        if unknown := sorted(set(chosen) - set(active[name])):
            raise LaunchError(
                f"The filter {text!r} names slot {unknown[0]} of {name}, which has {len(active[name])} slots."
            )
        named.setdefault(name, set()).update(chosen)
    left = {
        name: [slot for slot in slots if (slot in named.get(name, ())) is include] for name, slots in active.items()
    }
    return {name: slots for name, slots in left.items() if slots}


def _check_installed(launcher: str, environment: Mapping[str, str]) -> None:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        raise LaunchError("DeepSpeed is not installed: pip install 'accelerate[deepspeed]', on every machine.")
    program.find("deepspeed", environment, "It comes with DeepSpeed; is the environment's bin folder missing there?")
    if launcher in _PROGRAMS:
        program.find(
            _PROGRAMS[launcher],
            environment,
            f"--deepspeed_multinode_launcher {launcher} needs it; install it, or choose another.",
        )
    if launcher == "pdsh":
        source = pathlib.Path(next(iter(spec.submodule_search_locations)), "launcher", "runner.py")
        if source.is_file() and "DS_ENV_FILE" not in source.read_text(encoding="utf-8"):
            raise LaunchError(
                "This DeepSpeed is too old for --deepspeed_multinode_launcher pdsh; pip install -U deepspeed."
            )
