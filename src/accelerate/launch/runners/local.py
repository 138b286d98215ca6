"""Processes of this machine: one, in place of the launcher or as its child, or several under torch's elastic launcher."""

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.launch.errors import Reporter
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.runners import Process, program


def processes(plan: LaunchPlan, environment: Mapping[str, str]) -> list[Process]:
    """Return what `run` starts."""
    if plan.runner == "single":
        label = f"rank {plan.extra['RANK']}" if plan.num_processes > 1 and "RANK" in plan.extra else "the process"
        return [Process(label, tuple(plan.command), environment)]
    count, meet, started = plan.local_processes, plan.rendezvous, []
    shared = {
        "MASTER_ADDR": meet.host,
        **({"MASTER_PORT": meet.port} if meet.port else {}),  # else the system chooses one when the run starts
        "WORLD_SIZE": plan.num_processes,
        "LOCAL_WORLD_SIZE": count,
        "ROLE_NAME": plan["role"],
        "ROLE_WORLD_SIZE": plan.num_processes,
        "GROUP_RANK": plan.machines.rank,
        "GROUP_WORLD_SIZE": plan.machines.count,
        "TORCHELASTIC_MAX_RESTARTS": plan["max_restarts"],
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    for local in range(count):
        rank = plan.machines.rank * count + local
        own = {**shared, "RANK": rank, "LOCAL_RANK": local, "ROLE_RANK": rank}
        variables = {**environment, **{name: str(value) for name, value in own.items()}}
        started.append(Process(f"rank {rank}", tuple(plan.command), variables))
    return started


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Run the processes; the one process may replace the launcher, which watches over several."""
    if plan.runner == "single":
        program.start(plan.command, environment, replace)
        return
    with in_one_go():
        from accelerate.launch import elastic
    supervise(plan, plan.rendezvous, environment, elastic.Agent)


def supervise(plan: LaunchPlan, rendezvous: Any, environment: Mapping[str, str], agent: type) -> None:
    """Run the processes of this machine under torch's elastic launcher.

    Args:
        plan: what is started.
        rendezvous: the settings of one machine, or the rendezvous of several.
        environment: the variables that all processes share.
        agent: the class of the agent that watches them.
    """
    from accelerate.launch import elastic

    script, *arguments = plan.command
    tee = elastic.streams(plan)
    options = {name: plan[name] for name in ("role", "max_restarts", "monitor_interval")}
    with elastic.directory(plan["log_dir"]) as directory:
        config = elastic.make_config(plan.local_processes, rendezvous, directory, tee=tee, **options)
        reporter = Reporter(quiet=bool(plan["quiet"]), keeps_logs=plan["log_dir"] is not None)
        elastic.start(config, script, tuple(arguments), environment, bool(plan["debug"]), agent, reporter)


@contextlib.contextmanager
def in_one_go() -> Iterator[None]:
    """Import torch: without looking for garbage in between, and with Ctrl-C put off until it is there.

    Raises:
        KeyboardInterrupt: Ctrl-C came meanwhile.
    """
    # Importing torch makes many objects that live for ever; looking through them for garbage costs a tenth of the time. Its
    # import and that of NumPy catch whatever an optional part raises, an interrupt included, which was lost then.
    collects, came = gc.isenabled(), []
    main = threading.current_thread() is threading.main_thread()
    puts_off = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    gc.disable()
    if puts_off:
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        if puts_off:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if collects:
            gc.enable()
    if came:
        raise KeyboardInterrupt
