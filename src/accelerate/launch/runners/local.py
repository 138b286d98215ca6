"""Several processes of one machine, under torch's elastic launcher."""

import contextlib
import gc
from collections.abc import Iterator, Mapping

from accelerate.launch import logs
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.runners.base import Process
from accelerate.launch.runners.failures import Reporter


def processes(plan: LaunchPlan, environment: Mapping[str, str]) -> list[Process]:
    """Return what `run` starts.

    Args:
        plan: what is started.
        environment: the variables that all processes share.
    """
    logs.check(plan)
    count = plan.local_processes
    first = plan.machines.rank * count
    ranks = [
        {"RANK": first + local, "LOCAL_RANK": local, "WORLD_SIZE": plan.num_processes, "LOCAL_WORLD_SIZE": count}
        for local in range(count)
    ]
    return [
        Process(f"rank {own['RANK']}", tuple(plan.command), {**environment, **{k: str(v) for k, v in own.items()}})
        for own in ranks
    ]


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Run the processes of a plan under torch's elastic launcher.

    Args:
        plan: what is started.
        environment: the variables that all processes share.
        replace: has no effect; the launcher watches over its processes.

    Raises:
        LaunchError: the options about watching and logging cannot be used; nothing was started.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a process failed.
        torch.distributed.elastic.multiprocessing.api.SignalException: a signal stopped them.
    """
    logs.check(plan)
    with without_collection():
        from accelerate.launch import elastic

    program, *arguments = plan.command
    tee = logs.streams(plan)
    with logs.directory(plan["log_dir"]) as directory, logs.lines_at_once(tee):
        config = elastic.make_config(
            plan.num_processes,
            plan.rendezvous,
            directory,
            tee=tee,
            role=plan["role"],
            max_restarts=plan["max_restarts"],
            monitor_interval=plan["monitor_interval"],
        )
        reporter = Reporter(quiet=bool(plan["quiet"]))
        elastic.start(config, program, tuple(arguments), environment, verbose=bool(plan["debug"]), reporter=reporter)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Import without looking for garbage in between."""
    # Importing torch makes many objects that live for ever; looking through them for garbage costs a tenth of the time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
