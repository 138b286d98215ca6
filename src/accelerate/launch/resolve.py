"""From command line, environment, configuration file, scheduler and hardware to one frozen plan.

Every setting is decided here, by one rule: command line, then environment (a scheduler is part of it), then configuration file,
then what the hardware suggests, then default.

`merge` reads the settings. No function changes them afterwards: each one returns its changes and its notes, and `resolve` applies them.
"""

import argparse
import math
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, ModuleType
from typing import Any

from accelerate.config.options import BY_NAME, FEATURES, NEEDS_DEVICES, OPTIONS, PARADIGMS, SECTIONS
from accelerate.config.options.engines import ONLY_FSDP_1
from accelerate.config.strategies import specs
from accelerate.launch import config_file, hardware, runners
from accelerate.launch.config_file import FileSettings
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import BACKENDS, LaunchPlan, Rendezvous, Resolved, Source, features_on
from accelerate.runtime.ranks import DEFAULT_PORT, is_of_agent, schedulers

# What `--rdzv_conf` can say about several machines, in seconds.
_SECONDS = ("timeout", "join_timeout", "heartbeat_timeout")
# Options that only one version of FSDP reads, and what the other has in their place.
_OF_ONE_VERSION = {name: ("1", instead) for name, instead in ONLY_FSDP_1.items()}
_OF_ONE_VERSION["fsdp_module_precision"] = ("2", "mixed_precision holds for the whole model")
_OF_ONE_VERSION["fsdp_reshard_after_forward"] = ("2", "fsdp_sharding_strategy says what is sharded")
_SIZES = [f"parallelism_config_{axis}_size" for axis in ("pp", "dp_replicate", "dp_shard", "tp", "cp", "sp")]

Values = Mapping[str, Resolved]
Changes = dict[str, Resolved]
Environ = Mapping[str, str]


def resolve(args: argparse.Namespace, environ: Environ | None = None, needs_script: bool = True) -> LaunchPlan:
    """Decide what a command line starts; nothing is started or changed.

    A LaunchError says what contradicts itself, the machine or the file system. Without `needs_script`, the script
    need not exist.
    """
    environ = os.environ if environ is None else environ
    values, file = merge(args, environ)
    notes = list(file.unused) if file else []
    values = {**values, **choose_paradigm(values)}
    # The variables of the one process that this launch starts, if other launches start the others.
    position: Mapping[str, str] | None = None
    job = None
    if arranging := runners.asked_for(values, "arrange"):
        ranks, changes, lines = runners.module_of(arranging).arrange(values)
        position = ranks.variables
    else:
        arranged = (module.arrange(values, environ) for module in schedulers(environ))
        job, changes, lines = next(filter(None, arranged), (None, {}, []))
    values, notes = {**values, **changes}, notes + lines
    on = features_on(values)
    _check_numbers(values, on)
    changes, lines = _without_effect(values, on, file)
    values, notes = {**values, **changes}, notes + lines
    if needs_script:
        _check_script(args, values)

    other_runner = arranging or _other_runner(values, on, job)
    if job:
        position, changes, lines = job(values, other_runner)
        values, notes = {**values, **changes}, notes + lines
    meet, changes = (Rendezvous(), {}) if other_runner or position else _machines(values)
    values = {**values, **changes}
    devices, usable = _devices(values, environ)
    if other_runner:
        machines, why = values["num_machines"].value or 1, f"as {other_runner} finds them"
        values = {**values, "num_processes": _count(values, usable, machines, why)}
    elif not position:
        changes, lines = _count_by_devices(values, devices, usable, meet.machines)
        values, notes = {**values, **changes}, notes + lines
    count = values["num_processes"].value

    runner = other_runner or ("single" if position else _own_runner(values, count, meet.machines))
    if not (other_runner and getattr(runners.module_of(other_runner), "REMOTE", False)):
        notes += _check_layout(values, on)
        local = 1 if position else max(count // (values["num_machines"].value or 1), 1)
        changes, lines = share_cores(values, local)
        values, notes = {**values, **changes}, notes + lines
    extra = dict(position or {})
    if runner == "single" and not position:
        lines = _joined(environ)
        if is_of_agent(environ) or (not lines and any(module.ranks(environ) for module in schedulers(environ))):
            extra = {"RANK": "0", "WORLD_SIZE": "1"}  # or the worker would read the scheduler's variables, and join
        else:
            notes += lines
    for strategy_runner in _runners_of_strategies(on):
        extra |= strategy_runner.variables(values, environ) if hasattr(strategy_runner, "variables") else {}
    if runner in ("local", "machines"):
        meet, lines = _rendezvous(values, meet)
        notes += lines
    return LaunchPlan(
        settings=MappingProxyType(values),
        script=args.training_script,
        script_args=tuple(args.training_script_args or ()),
        num_processes=count,
        hardware=devices,
        on_cpu=bool(values["cpu"].value) or devices.device == "cpu",
        runner=runner,
        rendezvous=meet,
        extra=MappingProxyType(extra),
        notes=() if job and extra.get("RANK", "0") != "0" else tuple(notes),  # the first process prints them for all
    )


# The layers


def merge(args: argparse.Namespace, environ: Environ) -> tuple[Values, FileSettings | None]:
    """Merge the layers: command line over environment over configuration file over default; return the file, too.

    Without `args.nondefault`, a value that differs from the default counts as given. Scheduler and hardware come
    later.
    """
    given, nondefault = vars(args), getattr(args, "nondefault", ())
    path = config_file.find(given.get("config_file"), environ)
    file = config_file.read(path) if path else None
    values: Changes = {}
    for option in OPTIONS:
        name, value = option.name, given.get(option.name)
        if value is not None and (name in nondefault or value != option.default):
            values[name] = Resolved(value, Source.COMMAND_LINE)
        elif not environ.keys().isdisjoint(option.variables) and (value := option.read(environ)) is not None:
            values[name] = Resolved(value, Source.ENVIRONMENT, f"environment variable {option.variables[0]}")
        elif file and name in file.values:
            line = f":{file.lines[name]}" if file.lines.get(name) else ""
            values[name] = Resolved(file.values[name], Source.FILE, f"configuration file {file.path}{line}")
        else:
            values[name] = Resolved(option.default)
    # The worker always reads these two, so they need a value even where nothing sets them.
    for name in ("mixed_precision", "dynamo_backend"):
        if values[name].value is None:
            values[name] = Resolved("no")
    return MappingProxyType(values), file


def choose_paradigm(values: Values) -> Changes:
    """Keep the paradigm of the highest layer, and return the others switched off; a LaunchError refuses two in one layer."""
    changes: Changes = {}
    for names in (PARADIGMS, ("cpu", *NEEDS_DEVICES)):
        wanted = [name for name in names if changes.get(name, values[name]).value]
        top = max([values[name].source for name in wanted], default=None)
        chosen = [name for name in wanted if values[name].source is top]
        if len(chosen) > 1:
            flags = " and ".join([f"--{name}" for name in chosen])
            raise LaunchError(f"{flags} exclude each other ({values[chosen[0]].origin}). Choose one.")
        for name in wanted:
            if name != chosen[0]:
                changes[name] = Resolved(False, top, f"--{chosen[0]} was chosen")
    return changes


def _check_numbers(values: Values, on: set[str]) -> None:
    """Refuse numbers out of range."""
    for option in OPTIONS:
        if option.check and option.feature in (None, *on) and (fault := option.fault(values[option.name].value)):
            raise LaunchError(f"{_shown(values, option.name)}; {fault}.")


def _without_effect(values: Values, on: set[str], file: FileSettings | None) -> tuple[Changes, list[str]]:
    """Report settings of features that are off, and take back those of the configuration file."""
    changes: Changes = {}
    notes: list[str] = []
    for option in OPTIONS:
        value, source = values[option.name].value, values[option.name].source
        if option.feature in (None, *on):
            continue
        if source is Source.COMMAND_LINE and value not in (option.default, 0):  # machine 0 of one is right
            notes.append(f"{option.spellings[0]} has no effect without {FEATURES[option.feature].request}.")
    switches = [feature.switch for feature in FEATURES.values()]
    for section, needed in SECTIONS.items():
        if needed is None or needed in on or file is None:
            continue
        names = [name for name in file.values if BY_NAME[name].section == section and name not in switches]
        for name in names:
            if values[name].source is Source.FILE:
                changes[name] = Resolved(BY_NAME[name].default)
        if names:
            notes.append(f"{section} in {file.path} has no effect without {FEATURES[needed].request}.")
    return changes, notes


def _check_script(args: argparse.Namespace, values: Values) -> None:
    script, is_module, is_program = args.training_script, values["module"].value, values["no_python"].value
    if is_module and is_program:
        raise LaunchError("--module and --no_python exclude each other. Choose one.")
    if is_program and shutil.which(script) is None:
        raise LaunchError(f"{script!r} is no program: it is neither on the PATH nor an executable file.")
    if not (is_module or is_program or os.path.exists(script)):
        raise LaunchError(f"There is no script {script!r} (looked in {os.getcwd()}).")


# Who starts the processes, and on which machines and devices


def _other_runner(values: Values, on: set[str], job: Any) -> str | None:
    """Return the runner that starts the processes by another program, or None."""
    names = [name for feature, row in FEATURES.items() if feature in on for name in row.runners]
    names += [spec.runner for spec in specs() if spec.runner and spec.feature in on]
    starting = [name for name in names if runners.module_of(name).starts(values, on, job)]
    return starting[0] if starting else None


def _runners_of_strategies(on: set[str]) -> list[ModuleType]:
    return [runners.module_of(spec.runner) for spec in specs() if spec.runner and spec.feature in on]


def _own_runner(values: Values, count: int, machines: int) -> str:
    if machines > 1:
        return "machines"
    logs = values["log_dir"].value is not None or values["tee"].value != "0"
    return "local" if count > 1 or values["max_restarts"].value or logs else "single"


def _machines(values: Values) -> tuple[Rendezvous, Changes]:
    """Return how many machines a run of torch's elastic launcher has, and which one this is."""
    machines, rank = values["num_machines"], values["machine_rank"]
    if machines.value is None:
        return Rendezvous(), {"num_machines": replace(machines, value=1)}
    count = machines.value
    if count == 1:
        return Rendezvous(), {}
    if rank.value is not None and not 0 <= rank.value < count:
        raise LaunchError(f"{_shown(values, 'machine_rank')}; {count} machines are numbered from 0 to {count - 1}.")
    if rank.value is None and values["rdzv_backend"].value == "static":
        hint = f"Give --machine_rank, from 0 to {count - 1}; --rdzv_backend c10d numbers the machines itself."
        raise LaunchError(f"{_shown(values, 'num_machines')}, and nothing says which machine this is. {hint}")
    if not values["main_process_ip"].value:
        raise LaunchError(f"{_shown(values, 'num_machines')}. Give --main_process_ip, the address of machine 0.")
    changes: Changes = {}
    port = values["main_process_port"]
    if port.value is None:
        changes["main_process_port"] = Resolved(DEFAULT_PORT, Source.DEFAULT, "torch's default")
    elif fault := BY_NAME["main_process_port"].check(port.value):
        raise LaunchError(f"{_shown(values, 'main_process_port')}; {fault}, the same on each of them.")
    return Rendezvous(machines=count, machine=rank.value), changes


def _devices(values: Values, environ: Environ) -> tuple[hardware.Hardware, int]:
    """Find the devices of the run and how many of them it may use."""
    if values["cpu"].value:
        return hardware.Hardware("cpu", 0), 0
    devices, selected = hardware.detect(environ), values["gpu_ids"].value
    if selected in (None, "all") or devices.device == "cpu":
        return devices, devices.count
    ids = [part for part in str(selected).split(",") if part.strip()]
    if not ids:
        raise LaunchError(f"--gpu_ids is {selected!r}; write numbers separated by commas, or all.")
    return devices, len(ids)


# How many processes


def _count(values: Values, usable: int, machines: int, why: str) -> Resolved:
    """Return the number of processes on all machines together; where nothing sets it, one for each device."""
    asked = values["num_processes"]
    return asked if asked.value is not None else Resolved((usable or 1) * machines, Source.MACHINE, why)


def _count_by_devices(
    values: Values, devices: hardware.Hardware, usable: int, machines: int
) -> tuple[Changes, list[str]]:
    """Return the number of processes, and check that machines and devices can hold them."""
    why = f"one for each {devices.device} device" if usable else "one, without a GPU"
    why += f", on each of {machines} machines" if machines > 1 else ""
    number = _count(values, usable, machines, why)
    changes = {"num_processes": number}
    count, multi_gpu, asked = number.value, values["multi_gpu"], _shown(changes, "num_processes")
    local = count // machines
    if count % machines:
        raise LaunchError(f"{asked}, which cannot be shared evenly by {machines} machines. Ask for a multiple.")
    if multi_gpu.value and devices.device == "cpu":
        hint = "needs GPUs, and this machine shows none. Add --cpu to run the processes on the CPU."
        raise LaunchError(f"--multi_gpu (from the {multi_gpu.origin}) {hint}")
    if multi_gpu.value and multi_gpu.source is Source.COMMAND_LINE and count < 2:
        raise LaunchError(f"--multi_gpu needs at least two processes, and {asked}.")
    if usable and local > usable and not devices.shareable:
        share = f", {local} for each of {machines} machines" if machines > 1 else ""
        hint = f"Ask for at most {usable * machines}, or add --cpu to run on the CPU."
        raise LaunchError(f"{asked}{share}, and there are {usable} {devices.device} devices to use. {hint}")
    if count == 1 or devices.device != "cpu" or values["cpu"].value:
        return changes, []
    changes["cpu"] = Resolved(True, Source.MACHINE, "there is no GPU")
    return changes, [f"There is no GPU: {count} processes run on the CPU (gloo). --cpu says that this is meant."]


def _check_layout(values: Values, on: set[str]) -> list[str]:
    """Check the sizes of parallel dimensions; return notes of settings that this version of FSDP or a file of DeepSpeed ignores."""
    notes: list[str] = []
    if "parallelism" in on:
        _check_sizes(values)
    version = values["fsdp_version"].value
    for name, (owner, instead) in _OF_ONE_VERSION.items() if "fsdp" in on else ():
        is_set = values[name].source is not Source.DEFAULT and values[name].value not in (None, BY_NAME[name].default)
        depth = name.endswith("_prefetch") and str(values[name].value).isdigit()
        if is_set and version != owner and not depth:
            notes.append(f"--{name} ({values[name].origin}) has no effect with --fsdp_version {version}: {instead}.")
    for runner in _runners_of_strategies(on):
        notes += runner.notes(values) if hasattr(runner, "notes") else []
    return notes


def _check_sizes(values: Values) -> None:
    """Refuse sizes of parallel dimensions that do not multiply to the number of processes."""
    sizes = {name: values[name].value or 1 for name in _SIZES}
    total, count = math.prod(sizes.values()), values["num_processes"].value
    # With DeepSpeed's sequence parallelism, the remaining processes are its data parallelism.
    backend = values.get("parallelism_config_sp_backend")  # of an extension
    by_deepspeed = backend is not None and backend.value == "deepspeed" and sizes[_SIZES[-1]] > 1
    if total in (1, count) or (by_deepspeed and count % total == 0):
        return  # the worker takes all processes for copies where no size is set
    factors = [f"{name.removeprefix('parallelism_config_')}={size}" for name, size in sizes.items() if size > 1]
    product = f"{' x '.join(factors)} = {total}" if len(factors) > 1 else factors[0]
    hint = "or change the --parallelism_config_*_size options so that they multiply to the number of processes"
    asked = f"are for {product} processes, and {_shown(values, 'num_processes')}. Launch {total} processes, {hint}."
    raise LaunchError(f"The sizes of --use_parallelism_config {asked}")


def share_cores(values: Values, local: int) -> tuple[Changes, list[str]]:
    """Give each of several processes its part of the cores; a single one keeps torch's own choice."""
    if values["num_cpu_threads_per_process"].value is not None or local == 1:
        return {}, []
    cores = hardware.usable_cores()
    threads, why = max(1, cores // local), f"{cores} cores"
    share = f"OMP_NUM_THREADS={threads} for each of {local} processes ({why})"
    changes = {"num_cpu_threads_per_process": Resolved(threads, Source.MACHINE, why)}
    return changes, [f"{share}; --num_cpu_threads_per_process changes it."]


# How the processes find each other


def _rendezvous(values: Values, meet: Rendezvous) -> tuple[Rendezvous, list[str]]:
    backend, port = values["rdzv_backend"].value, values["main_process_port"].value or 0
    if backend not in BACKENDS:
        raise LaunchError(f"{_shown(values, 'rdzv_backend')}; choose one of {', '.join(BACKENDS)}.")
    settings = _rendezvous_settings(values)
    meet = replace(meet, backend=backend, port=port, settings=settings)
    if meet.machines == 1:
        if port:
            _check_port(values)
        return meet, []
    unknown = sorted(settings.keys() - {*_SECONDS})
    notes = [f"--rdzv_conf {key} has no effect on several machines; {', '.join(_SECONDS)} have." for key in unknown]
    if backend == "static" and values["max_restarts"].value:
        backend, needed = "c10d", "the rendezvous c10d, which is used at the same address"
        notes.append(f"--max_restarts on several machines needs {needed}.")
    return replace(meet, backend=backend, host=str(values["main_process_ip"].value)), notes


def _rendezvous_settings(values: Values) -> dict[str, str]:
    settings = {}
    for part in filter(None, str(values["rdzv_conf"].value or "").split(",")):
        key, equals, value = map(str.strip, part.partition("="))
        if not equals:
            raise LaunchError(f"--rdzv_conf holds {part!r}; write key=value,key=value.")
        if key in _SECONDS and not (re.fullmatch(r"\d+(\.\d+)?", value) and float(value)):
            raise LaunchError(f"--rdzv_conf holds {part}; it takes a number of seconds above 0.")
        settings[key] = value
    return settings


def _check_port(values: Values) -> None:
    try:
        # It sets SO_REUSEADDR, as torch's store does: a port whose last connections are merely closing down is free.
        socket.create_server(("127.0.0.1", values["main_process_port"].value)).close()
    except (OSError, OverflowError) as error:
        raise LaunchError(f"{_shown(values, 'main_process_port')}: {error} Omit it to get a free one.") from None


def _joined(environ: Environ) -> list[str]:
    """Return a line about the run that the worker joins because of its variables, as a cluster's controller sets them."""
    rank, size = (environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE"))
    if not rank or size in ("", "1"):
        return []
    place = f"{environ.get('MASTER_ADDR', 'MASTER_ADDR, which is not set')}, port {environ.get('MASTER_PORT', DEFAULT_PORT)}"
    joins = f"this process joins a run of {size} processes as rank {rank} at {place}"
    return [f"RANK={rank} and WORLD_SIZE={size} are set: {joins}. Unset them for a separate run."]


def _shown(values: Mapping[str, Resolved], name: str) -> str:
    """Return an option with its value and who set it, for a message."""
    return f"--{name} is {values[name].value} ({values[name].origin})"
