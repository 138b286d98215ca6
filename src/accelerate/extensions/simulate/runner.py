"""One process that plays one rank of a large run: `accelerate.extensions.simulate` runs the script in it."""

import sys
from collections.abc import Mapping

from accelerate.config.options import BY_NAME, FEATURES
from accelerate.extensions.reports import device_specs
from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import LaunchPlan, Resolved, Source, features_on
from accelerate.launch.runners import Process
from accelerate.runtime.ranks import Ranks

BY = "in place of the launcher, as one rank whose others are made up"
# Features that start processes themselves, or communicate without torch's process groups.
_REFUSED = ("deepspeed", "megatron", "fp8")
# Settings that decide how processes of several machines are started and meet.
_OF_A_LAUNCH = (
    *("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf", "max_restarts"),
    *("gpu_ids", "tee", "log_dir", "no_python"),
)


def arrange(values: Mapping[str, Resolved]) -> tuple[Ranks, dict[str, Resolved], list[str]]:
    """Return the rank of a simulated run, the settings that it changes, and notes; a LaunchError says what contradicts it."""
    asked, rank = values["simulate"].value, values["simulate_rank"].value or 0
    if fault := BY_NAME["simulate"].check(asked):
        raise LaunchError(f"--simulate is {asked!r}; {fault}.")
    with_runners = {name for name, feature in FEATURES.items() if feature.runners}
    for feature in sorted(features_on(values) & (with_runners | {*_REFUSED})):
        title, origin = FEATURES[feature].title, values[FEATURES[feature].switch].origin
        hint = "It runs what torch's process groups do: DDP, FSDP and --use_parallelism_config"
        raise LaunchError(f"--simulate does not run {title} (from the {origin}). {hint}.")
    for name in _OF_A_LAUNCH:
        if values[name].source is Source.COMMAND_LINE:
            raise LaunchError(f"--{name} has no meaning with --simulate, which starts one process here. Omit it.")
    if (device := values["simulate_device"].value) is not None:
        try:
            device_specs.device_spec(device)
        except ValueError as error:
            raise LaunchError(f"--simulate_device is {device!r}. {error}") from None
    machines, processes = map(int, asked.split("x"))
    counts = {"num_machines": machines, "num_processes": machines * processes}
    changes: dict[str, Resolved] = {}
    notes = []
    for name, count in counts.items():
        setting = values[name]
        if setting.value not in (None, count):
            if setting.source is Source.COMMAND_LINE:
                raise LaunchError(f"--{name} is {setting.value}, and --simulate {asked} means {count}. Omit it.")
            notes.append(f"{name} is {count} (--simulate {asked}), not {setting.value} ({setting.origin}).")
        changes[name] = Resolved(count, values["simulate"].source, f"--simulate {asked}")
    if not 0 <= rank < counts["num_processes"]:
        raise LaunchError(f"--simulate_rank is {rank}; {asked} has the ranks 0 to {counts['num_processes'] - 1}.")
    off = [name for name in ("multi_gpu", "enable_cpu_affinity") if name in values and values[name].value]
    for name, value in {"cpu": True, **dict.fromkeys(off)}.items():
        changes[name] = Resolved(value, Source.MACHINE, "a simulated run")
    return Ranks(rank, counts["num_processes"], rank % processes, processes, "torchrun"), changes, notes


def summary(plan: LaunchPlan) -> str:
    """Return which process would be started."""
    return f"1 of {plan.num_processes} {'process' if plan.num_processes == 1 else 'processes'} on the CPU"


def process(plan: LaunchPlan, environment: Mapping[str, str]) -> Process:
    """Return the process that plays the rank."""
    words = [sys.executable, "-m", "accelerate.extensions.simulate", *(["-m"] if plan["module"] else [])]
    return Process(f"rank {plan.extra['RANK']}", (*words, plan.script, *plan.script_args), environment)


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Run the process to its end, or become it."""
    runners.start(process(plan, environment).command, environment, replace)
