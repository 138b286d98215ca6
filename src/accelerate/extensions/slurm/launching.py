"""What a launch takes from a scheduler: its number of machines, which one this is, and where they meet; or the one process that it is."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.extensions.slurm.variables import Cluster
from accelerate.launch import hardware
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import Resolved, Source
from accelerate.launch.resolve import share_cores
from accelerate.runtime.ranks import DEFAULT_PORT

Values = Mapping[str, Resolved]
Changes = dict[str, Resolved]
Environ = Mapping[str, str]


def arrange(cluster: Cluster, values: Values, environ: Environ) -> tuple[Any, Changes, list[str]]:
    """Fill in what the command line leaves open, see `runtime.ranks.schedulers`; nothing where it asks for other machines."""
    asked = values["num_machines"]
    if asked.source is Source.COMMAND_LINE and asked.value != cluster.machines:
        unused = f"not {cluster.machines} as with {cluster.source}, which is unused"
        return None, {}, [f"--num_machines is {asked.value}, {unused}."]
    changes: Changes = {}
    notes: list[str] = []
    if cluster.machines > 1 or cluster.task:
        offers = {"num_machines": cluster.machines, "machine_rank": cluster.machine_rank}
        offers |= {"main_process_ip": cluster.address, "main_process_port": cluster.port}
        for name, offered in offers.items():
            former = values[name]
            if offered is None or former.source >= Source.ENVIRONMENT:
                continue
            changes[name] = Resolved(offered, Source.ENVIRONMENT, cluster.source)
            if former.source is Source.FILE and former.value != offered:
                notes.append(f"{name} is {offered!r} (from {cluster.source}), not {former.value!r} ({former.origin}).")
    return Job(cluster, environ), changes, notes


@dataclass(frozen=True)
class Job:
    """What a scheduler knows of this launch; `extensions.warm_start` reads `source` and `starts_each_process`."""

    cluster: Cluster
    environ: Environ

    @property
    def source(self) -> str:
        """Who told of the machines, in words."""
        return self.cluster.source

    @property
    def starts_each_process(self) -> bool:
        """Whether the scheduler has started one launch for each process."""
        return self.cluster.task is not None

    def __call__(self, values: Values, runner: str | None) -> tuple[dict[str, str] | None, Changes, list[str]]:
        """Return the variables of the task that this launch starts, its settings and notes; no variables where it starts a machine's processes."""
        cluster, task = self.cluster, self.cluster.task
        if task is None:
            stays = runner is None and (values["num_machines"].value or 1) == 1
            return None, {}, list(cluster.notes) if stays else []
        if runner is not None:
            started = f"{cluster.source} has started {task.world_size} of these launches"
            return None, {}, [f"{started}, and each of them starts a whole run by {runner}. Start one launch alone."]
        count, notes = _count(cluster, values)
        cores, lines = _cores(cluster, values)
        return _variables(cluster, values, self.environ), {"num_processes": count, **cores}, notes + lines


def _count(cluster: Cluster, values: Values) -> tuple[Resolved, list[str]]:
    """Return the number of processes of a run whose tasks a scheduler has started: each is one process."""
    scheduler, asked, count = cluster.source, values["num_processes"], cluster.task.world_size
    if asked.source is Source.COMMAND_LINE and asked.value != count:
        started = f"{scheduler} has started {count} tasks, each a process of the run"
        raise LaunchError(f"--num_processes is {asked.value}, and {started}.")
    notes = []
    if asked.source is Source.FILE and asked.value != count:
        notes.append(f"num_processes is {count} ({scheduler}'s tasks), not {asked.value} ({asked.origin}).")
    for name in ("max_restarts", "log_dir", "tee"):
        if values[name].source is Source.COMMAND_LINE:
            notes.append(f"--{name} has no effect: {scheduler} has started each process separately.")
    return Resolved(count, Source.ENVIRONMENT, f"{scheduler}'s tasks"), notes


def _cores(cluster: Cluster, values: Values) -> tuple[Changes, list[str]]:
    """Return the cores of a task, which the scheduler may have bound it to."""
    changes, notes = share_cores(values, cluster.task.local_world_size or 1)
    if not changes or not _is_bound():
        return changes, notes
    why = f"cores of this task ({cluster.source})"
    return {"num_cpu_threads_per_process": Resolved(hardware.usable_cores(), Source.MACHINE, why)}, []


def _is_bound() -> bool:
    """Return whether this process is bound to some of the machine's cores."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


def _variables(cluster: Cluster, values: Values, environ: Environ) -> dict[str, str]:
    """Return the variables of the process, in torchrun's words."""
    task, machines = cluster.task, values["num_machines"].value
    alone = task.local_world_size in (None, task.world_size) and machines in (None, 1)
    address = values["main_process_ip"].value or environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else None)
    if address is None:
        where = f"{cluster.source} has started tasks on {machines} machines, and does not say where they meet"
        raise LaunchError(f"{where}. Give --main_process_ip, the address of the machine of rank 0, to all of them.")
    port = values["main_process_port"].value or environ.get("MASTER_PORT") or DEFAULT_PORT
    return {**task.variables, "MASTER_ADDR": str(address), "MASTER_PORT": str(port)}
