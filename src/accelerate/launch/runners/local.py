"""Several processes of this machine under torch's elastic launcher."""

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.launch.errors import Reporter
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.runners import Process

BY = "by torch's elastic launcher on this machine"
# Read once, when torch is imported.
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def process(plan: LaunchPlan, environment: Mapping[str, str]) -> Process:
    """Return what `run` starts, once or several times: torch's elastic launcher adds a rank, and where they meet."""
    label = f"each of {plan.local_processes} processes" if plan.local_processes > 1 else "the process"
    return Process(label, tuple(plan.command), environment)


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Run the processes, and watch over them."""
    with in_one_go():
        from accelerate.launch import elastic
    supervise(plan, environment, plan.rendezvous, elastic.Agent)


def supervise(plan: LaunchPlan, environment: Mapping[str, str], rendezvous: Any, agent: Any) -> None:
    """Run the processes of this machine, which meet by a rendezvous, under an `elastic.Agent`."""
    from accelerate.launch import elastic  # imports torch

    script, *arguments = plan.command
    options = {name: plan[name] for name in ("role", "max_restarts", "monitor_interval")}
    options |= {"tee": elastic.streams(plan), "agent": agent, "verbose": bool(plan["debug"])}
    options["reporter"] = Reporter(quiet=bool(plan["quiet"]))
    with elastic.directory(plan["log_dir"]) as directory:
        elastic.start(script, tuple(arguments), environment, plan.local_processes, rendezvous, directory, **options)


@contextlib.contextmanager
def in_one_go() -> Iterator[None]:
    """Import torch: without garbage collection, with Ctrl-C put off until it is there, without its C++ warnings."""
    # Importing torch makes many objects that live for ever; looking through them for garbage costs a tenth of the time. Its
    # import and that of NumPy catch whatever an optional part raises, an interrupt included, which was lost then. A store whose
    # other side is gone writes a page of addresses of its functions; the launcher says in a line what it means.
    collects, came, is_quiet = gc.isenabled(), [], _LOG_LEVEL in os.environ
    main = threading.current_thread() is threading.main_thread()
    puts_off = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    gc.disable()
    os.environ.setdefault(_LOG_LEVEL, "ERROR")
    if puts_off:
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        if puts_off:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not is_quiet:  # the processes keep their warnings
            os.environ.pop(_LOG_LEVEL, None)
        if collects:
            gc.enable()
    if came:
        raise KeyboardInterrupt
