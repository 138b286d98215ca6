"""From flags, environment, configuration file and hardware to one frozen plan.

Every setting is decided here, by one rule: command line, then environment, then configuration file, then default.
"""

import argparse
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from accelerate.config import env
from accelerate.config.options import BY_NAME, FEATURES, NEEDS_DEVICES, OPTIONS, PARADIGMS, SECTIONS
from accelerate.launch import cluster, config_file, hardware, layout, machines
from accelerate.launch.errors import LaunchError, NotAvailableError
from accelerate.launch.option import strayed
from accelerate.launch.plan import LaunchPlan, Machines, Rendezvous, Resolved, Source
from accelerate.runtime.ranks import DEFAULT_PORT, Ranks


@dataclass(frozen=True)
class Settings:
    """All options after the layers are merged, before hardware is looked at.

    Attributes:
        values: option name to resolved value.
        file: the configuration file, or None.
        notes: messages about settings that have no effect.
    """

    values: Mapping[str, Resolved]
    file: config_file.FileSettings | None
    notes: tuple[str, ...]


def resolve(
    args: argparse.Namespace, environ: Mapping[str, str] | None = None, needs_script: bool = True
) -> LaunchPlan:
    """Decide what a command line starts.

    Nothing is started or changed: the environment is read, the configuration file and the script are looked at.

    Args:
        args: what `accelerate.commands.launch.launch_command_parser` parsed.
        environ: the variables; those of the process by default.
        needs_script: whether a script that is not there is an error.

    Raises:
        LaunchError: the request contradicts itself, the machine or the file system.
        NotAvailableError: it needs a runner or an engine that does not exist yet.
        FileNotFoundError: the configuration file does not exist.

    Example:
        >>> from accelerate.commands.launch import launch_command_parser
        >>> plan = resolve(launch_command_parser().parse_args(["--cpu", "--num_processes", "2", "-m", "timeit"]))
        >>> plan.num_processes, plan.settings["cpu"].origin
        (2, 'command line')
    """
    environ = os.environ if environ is None else environ
    merged = merge(args, environ)
    values = dict(merged.values)
    choose_paradigm(values)
    notes = list(merged.notes)
    _require_available(values, notes)
    scheduler = cluster.find(environ)
    found = machines.ask_cluster(values, scheduler, notes)
    notes += _without_effect(values, merged.file)
    if needs_script:
        _check_script(args, values)
    if not (values["module"].value or values["no_python"].value):
        notes += strayed(args.training_script, args.training_script_args or (), getattr(args, "nondefault", ()))
    task = found.task if found else None
    elsewhere = _elsewhere(values, found)
    place = Machines() if elsewhere or task else machines.settle(values, found)
    machine, count = _devices(values, environ)
    if elsewhere:
        num_processes = _count_elsewhere(values, elsewhere, count)
    elif task:
        num_processes = _count_tasks(values, task, found.source, notes)
    else:
        num_processes = _count_processes(values, machine, count, place.count, notes)
    if elsewhere not in ("sagemaker", "tpu_pod"):  # nobody here knows how many processes those start
        notes += layout.check(values, num_processes)
    hosts = values["num_machines"].value or 1 if elsewhere else place.count
    local = task.local_world_size or 1 if task else max(num_processes // hosts, 1)
    runner = elsewhere or _runner(values, num_processes, place, task)
    if elsewhere not in ("sagemaker", "tpu_pod"):
        _share_cores(values, local, found if task else None, notes)
    if found and not task and not elsewhere and place.count == 1:
        notes += found.notes
    if task:
        notes += _without_effect_on_tasks(values, found.source)
    if runner == "single" and not task and environ.get("WORLD_SIZE", "1") not in ("", "1"):
        notes.append(
            f"RANK={environ.get('RANK')} and WORLD_SIZE={environ['WORLD_SIZE']} are set: the script joins the processes of "
            "another launcher. Unset them for a run of its own."
        )
    supervised = runner in ("local", "machines")
    rendezvous = machines.rendezvous(values, place, notes) if supervised else Rendezvous()
    if runner == "local":
        _check_port(values)
    return LaunchPlan(
        settings=MappingProxyType(values),
        script=args.training_script,
        script_args=tuple(args.training_script_args or ()),
        num_processes=num_processes,
        hardware=machine,
        on_cpu=bool(values["cpu"].value) or machine.device == "cpu",
        runner=runner,
        machines=place,
        rendezvous=rendezvous,
        extra=MappingProxyType(_extra(values, environ, runner, found, scheduler)),
        # They would be told once by each task.
        notes=() if task and task.rank else tuple(notes),
    )


def merge(args: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Merge the layers: command line over environment over configuration file over default.

    Args:
        args: parsed arguments. Without `nondefault`, a value that differs from the default counts as given.
        environ: the variables.

    Raises:
        LaunchError: a variable or the configuration file holds something that is no value of its option.
        FileNotFoundError: the configuration file does not exist.
    """
    path = config_file.find(getattr(args, "config_file", None), environ)
    file = config_file.read(path) if path else None
    try:
        from_environment = env.read_all(environ)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    values: dict[str, Resolved] = {}
    for option in OPTIONS:
        name = option.name
        value = getattr(args, name, None)
        if value is not None and (name in getattr(args, "nondefault", ()) or value != option.default):
            values[name] = Resolved(value, Source.COMMAND_LINE)
        elif name in from_environment:
            value, variable = from_environment[name]
            values[name] = Resolved(value, Source.ENVIRONMENT, f"environment variable {variable}")
        elif file and name in file.values:
            values[name] = Resolved(file.values[name], Source.FILE, f"configuration file {file.path}")
        else:
            values[name] = Resolved(option.default)
    # The worker is always told these two, so they need a value even where nobody cares.
    for name in ("mixed_precision", "dynamo_backend"):
        if values[name].value is None:
            values[name] = Resolved("no")
    return Settings(values, file, file.unused if file else ())


def choose_paradigm(values: dict[str, Resolved]) -> None:
    """Keep the paradigm of the highest layer; two in one layer contradict each other.

    Args:
        values: option name to resolved value; changed in place.

    Raises:
        LaunchError: one layer asks for two.
    """
    for names in (PARADIGMS, ("cpu", *NEEDS_DEVICES)):
        wanted = [name for name in names if values[name].value]
        if not wanted:
            continue
        top = max(values[name].source for name in wanted)
        chosen = [name for name in wanted if values[name].source is top]
        if len(chosen) > 1:
            flags = " and ".join(f"--{name}" for name in chosen)
            raise LaunchError(f"{flags} exclude each other ({values[chosen[0]].origin}). Choose one.")
        for name in wanted:
            if name != chosen[0]:
                values[name] = Resolved(False, top, f"--{chosen[0]} was chosen")


def _require_available(values: Mapping[str, Resolved], notes: list[str]) -> None:
    for feature in FEATURES.values():
        switch = values[feature.switch]
        if not feature.ready and feature.is_on(switch.value):
            line = (
                f"{feature.title} ({feature.request}, from the {switch.origin}) is not available in this version yet. "
                f"What works: {feature.instead}."
            )
            if not values["dry_run"].value:
                raise NotAvailableError(line)
            notes.append(line)


def _without_effect(values: dict[str, Resolved], file: config_file.FileSettings | None) -> list[str]:
    """Report settings of features that are off, and drop what their sections of the file set."""
    off = {name for name, feature in FEATURES.items() if not feature.is_on(values[feature.switch].value)}
    switches = {feature.switch for feature in FEATURES.values()}
    notes = [
        f"{option.spellings[0]} has no effect without {FEATURES[option.feature].request}."
        for option in OPTIONS
        if option.feature in off
        and values[option.name].source is Source.COMMAND_LINE
        and values[option.name].value not in (option.default, 0)  # machine 0 of one machine is right
    ]
    for section, feature in SECTIONS.items():
        if feature not in off or file is None:
            continue
        names = [name for name in file.values if BY_NAME[name].section == section and name not in switches]
        for name in names:
            if values[name].source is Source.FILE:
                values[name] = Resolved(BY_NAME[name].default)
        if names:
            notes.append(f"{section} in {file.path} has no effect without {FEATURES[feature].request}.")
    return notes


def _check_script(args: argparse.Namespace, values: Mapping[str, Resolved]) -> None:
    script = args.training_script
    if values["module"].value and values["no_python"].value:
        raise LaunchError("--module and --no_python exclude each other. Choose one.")
    if values["no_python"].value:
        if shutil.which(script) is None:
            raise LaunchError(f"{script!r} is no program: it is neither on the PATH nor an executable file.")
    elif values["module"].value:
        if not _is_module(script.partition(".")[0]):
            raise LaunchError(f"There is no module {script!r}, neither installed nor in {os.getcwd()}.")
    elif not os.path.exists(script):
        hint = " It looks like an option: options of the launcher come before the script." if script[:1] == "-" else ""
        raise LaunchError(f"There is no script {script!r} (looked in {os.getcwd()}).{hint}")


def _is_module(name: str) -> bool:
    # `python -m` looks in the working directory first, which is not on the path of a console script.
    here = os.path.join(os.getcwd(), name)
    if os.path.isdir(here) or os.path.isfile(f"{here}.py"):
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return name in sys.modules


def _devices(values: Mapping[str, Resolved], environ: Mapping[str, str]) -> tuple[hardware.Hardware, int]:
    """Find the devices of the run and how many of them it may use."""
    if values["cpu"].value:
        return hardware.Hardware("cpu", 0), 0
    machine = hardware.detect(environ)
    selected = values["gpu_ids"].value
    if selected in (None, "all") or machine.device == "cpu":
        return machine, machine.count
    ids = [part.strip() for part in str(selected).split(",") if part.strip()]
    if not ids:
        raise LaunchError(f"--gpu_ids is {selected!r}; write numbers separated by commas, or all.")
    return machine, len(ids)


def _elsewhere(values: Mapping[str, Resolved], found: cluster.Cluster | None) -> str | None:
    """Return the runner that starts the processes by another program, or None."""
    on = {name for name, feature in FEATURES.items() if feature.is_on(values[feature.switch].value)}
    if "deepspeed" in on and values["deepspeed_multinode_launcher"].value is not None:
        from accelerate.launch.runners import deepspeed  # only where it is asked for

        deepspeed.check_launcher(values["deepspeed_multinode_launcher"].value)
    if "sagemaker" in on:
        return "sagemaker"
    if "tpu" in on:
        return "tpu_pod" if values["tpu_use_cluster"].value else "tpu"
    if "mpi" in on:
        return "mpi"
    # Under a scheduler that has started this launch on every machine, nobody needs to log in to the others.
    own = values["deepspeed_multinode_launcher"].value
    several = (values["num_machines"].value or 1) > 1
    if "deepspeed" in on and several and own != "standard" and not (own is None and found):
        return "deepspeed"
    return None


def _runner(values: Mapping[str, Resolved], num_processes: int, place: Machines, task: Ranks | None) -> str:
    if task:
        return "single"
    if place.count > 1:
        return "machines"
    return "local" if num_processes > 1 or values["max_restarts"].value or _logs(values) else "single"


def _count_elsewhere(values: dict[str, Resolved], runner: str, count: int) -> int:
    """Settle the number of processes that another program starts; only that program knows the devices of other machines."""
    asked = values["num_processes"]
    if asked.value is None:
        several = values["num_machines"].value or 1
        asked = values["num_processes"] = Resolved((count or 1) * several, Source.MACHINE, f"as {runner} finds them")
    if asked.value < 1:
        raise LaunchError(f"--num_processes is {asked.value} ({asked.origin}); it must be at least 1.")
    return asked.value


def _count_tasks(values: dict[str, Resolved], task: Ranks, scheduler: str, notes: list[str]) -> int:
    """Each task that a scheduler has started is one process."""
    asked = values["num_processes"]
    if asked.source is Source.COMMAND_LINE and asked.value != task.world_size:
        raise LaunchError(
            f"--num_processes is {asked.value}, and {scheduler} has started {task.world_size} tasks, each of which is one process "
            "of the run. Leave the option out, or let the scheduler start one task on each machine."
        )
    if asked.source is Source.FILE and asked.value != task.world_size:
        notes.append(f"num_processes is {task.world_size} ({scheduler}'s tasks), not {asked.value} ({asked.origin}).")
    values["num_processes"] = Resolved(task.world_size, Source.ENVIRONMENT, f"{scheduler}'s tasks")
    return task.world_size


def _extra(
    values: Mapping[str, Resolved],
    environ: Mapping[str, str],
    runner: str,
    found: cluster.Cluster | None,
    scheduler: cluster.Cluster | None,
) -> dict[str, str]:
    """Return the variables of the processes that no option carries."""
    extra = {}
    if found and found.task:
        extra = _rank_variables(found, values, environ)
    elif runner == "single" and scheduler and scheduler.task:
        extra = {"RANK": "0", "WORLD_SIZE": "1"}  # or the worker would read the scheduler's variables, and join
    if values["use_deepspeed"].value:
        from accelerate.launch.runners import deepspeed  # only where it is asked for

        extra |= deepspeed.exports(values, environ)
    return extra


def _rank_variables(
    found: cluster.Cluster, values: Mapping[str, Resolved], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of one process that a scheduler has started, in torchrun's words."""
    task = found.task
    alone = task.local_world_size in (None, task.world_size) and values["num_machines"].value in (None, 1)
    address = values["main_process_ip"].value or environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else None)
    if address is None:
        raise LaunchError(
            f"{found.source} has started tasks on {values['num_machines'].value} machines, and does not say where they meet. Give "
            f"--main_process_ip, the address of the machine of rank 0, to all of them. {found.no_address}".rstrip()
        )
    known = {
        "RANK": task.rank,
        "WORLD_SIZE": task.world_size,
        "LOCAL_RANK": task.local_rank,
        "LOCAL_WORLD_SIZE": task.local_world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": values["main_process_port"].value or environ.get("MASTER_PORT") or DEFAULT_PORT,
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def _count_processes(
    values: dict[str, Resolved], machine: hardware.Hardware, count: int, num_machines: int, notes: list[str]
) -> int:
    """Settle the number of processes, over all machines, and whether they run on the CPU."""
    asked = values["num_processes"]
    if asked.value is None:
        why = f"one for each {machine.device} device" if count else "one, without a GPU"
        why += f", on each of {num_machines} machines" if num_machines > 1 else ""
        asked = values["num_processes"] = Resolved((count or 1) * num_machines, Source.MACHINE, why)
    if asked.value < 1:
        raise LaunchError(f"--num_processes is {asked.value} ({asked.origin}); it must be at least 1.")
    if asked.value % num_machines:
        raise LaunchError(
            f"--num_processes is {asked.value} ({asked.origin}), over all machines, and cannot be shared evenly by {num_machines} "
            f"machines ({values['num_machines'].origin}). Ask for {asked.value // num_machines * num_machines or num_machines}, say."
        )
    here = asked.value // num_machines
    if values["multi_gpu"].value and machine.device == "cpu":
        raise LaunchError(
            f"--multi_gpu (from the {values['multi_gpu'].origin}) needs GPUs, and this machine shows none. Add --cpu to "
            "run the processes on the CPU."
        )
    if values["multi_gpu"].source is Source.COMMAND_LINE and values["multi_gpu"].value and asked.value < 2:
        raise LaunchError(
            f"--multi_gpu needs at least two processes, and --num_processes is {asked.value} ({asked.origin})."
        )
    if count and here > count and not machine.shareable:
        each = f", {here} for each of {num_machines} machines" if num_machines > 1 else ""
        raise LaunchError(
            f"--num_processes is {asked.value} ({asked.origin}){each}, and there are {count} {machine.device} devices to use. "
            f"Ask for at most {count * num_machines}, or add --cpu to run on the CPU."
        )
    if asked.value > 1 and machine.device == "cpu" and not values["cpu"].value:
        values["cpu"] = Resolved(True, Source.MACHINE, "there is no GPU")
        notes.append(f"There is no GPU: {asked.value} processes run on the CPU (gloo). --cpu says that this is meant.")
    return asked.value


def _logs(values: Mapping[str, Resolved]) -> bool:
    return values["log_dir"].value is not None or values["tee"].value != "0"


def _without_effect_on_tasks(values: Mapping[str, Resolved], scheduler: str) -> list[str]:
    return [
        f"--{name} has no effect: {scheduler} has started each process by itself, and watches over it."
        for name in ("max_restarts", "log_dir", "tee")
        if values[name].source is Source.COMMAND_LINE
    ]


def _share_cores(
    values: dict[str, Resolved], num_processes: int, tasks: cluster.Cluster | None, notes: list[str]
) -> None:
    """Give each of several processes its part of the cores; a single one keeps torch's own choice."""
    if values["num_cpu_threads_per_process"].value is not None or num_processes == 1:
        return
    cores = hardware.usable_cores()
    if tasks and (tasks.cpus_per_task or hardware.is_bound()):
        # The scheduler has done that already.
        threads = min(tasks.cpus_per_task or cores, cores)
        values["num_cpu_threads_per_process"] = Resolved(
            threads, Source.MACHINE, f"cores of this task ({tasks.source})"
        )
        return
    threads = max(1, cores // num_processes)
    values["num_cpu_threads_per_process"] = Resolved(threads, Source.MACHINE, f"{cores} cores")
    notes.append(
        f"OMP_NUM_THREADS={threads} for each of {num_processes} processes ({cores} cores); "
        "--num_cpu_threads_per_process changes it."
    )


def _check_port(values: Mapping[str, Resolved]) -> None:
    port = values["main_process_port"].value or 0
    if port and not _is_free(port):
        raise LaunchError(
            f"--main_process_port is {port} ({values['main_process_port'].origin}), and something already listens there. "
            "Leave the option out to get a free port."
        )


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As torch's store does: a port whose last connections are merely closing down is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OverflowError:
            raise LaunchError(f"--main_process_port is {port}; ports end at 65535.") from None
        except OSError:
            return False
    return True


def fill(args: argparse.Namespace, plan: LaunchPlan) -> argparse.Namespace:
    """Write the resolved values into parsed arguments, for code that reads those.

    Args:
        args: the arguments; they are changed in place.
        plan: what they resolved to.

    Returns:
        The same arguments.
    """
    for name, resolved in plan.settings.items():
        setattr(args, name, resolved.value)
    args.use_cpu = plan.on_cpu and bool(plan["cpu"])
    return args
