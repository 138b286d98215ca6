"""Several processes of one machine, under torch's elastic launcher."""

import contextlib
import gc
import signal
import threading
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
    with in_one_go():
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
        reporter = Reporter(quiet=bool(plan["quiet"]), keeps_logs=plan["log_dir"] is not None)
        elastic.start(config, program, tuple(arguments), environment, verbose=bool(plan["debug"]), reporter=reporter)


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
