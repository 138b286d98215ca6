"""Start what a plan says. One module a way of starting.

A runner is a module of this folder, or one that an extension names in `Spec.runners`:

- `process(plan, environment)` returns what would be started, and starts nothing.
- `run(plan, environment, replace)` starts it and waits for its end. A failure is raised; `errors.failure_of` turns it into an
  exit status and a line. `replace` becomes the process that is started, where that is possible.
- `BY` says who starts the processes, such as "by mpirun".
- `starts(values, on, job)`, of a runner that a `Feature` or a `StrategySpec` names, says whether it starts this run: the settings, the
  features that are on, and what a scheduler has started.
- `arrange(values)`, of a runner that an option of its name asks for, returns the `Ranks` of the one process that it starts, the settings
  that it changes, and notes. No scheduler, device or other machine is asked then. Optional.
- `show(plan)`, of a runner that an option of its name asks for, returns a text that is printed; nothing is started then. Optional.
- `REMOTE = True` says that the launcher knows neither the cores nor the devices of the machines. Optional.
- `variables(values, environ)` returns what a run of the `StrategySpec` that names it needs besides the variables of options, and
  `notes(values)` lines about its settings, whatever starts the run. Optional.
- `summary(plan)` returns how many processes run on what, where the plan does not say. Optional.

`environment` is what `accelerate.launch.plan.worker_environment` made of the plan: all variables, those of the launcher included.
Both raise `LaunchError` where the request cannot be run as written.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from accelerate import extension
from accelerate.launch.errors import PREFIX, LaunchError, to_stderr
from accelerate.launch.guard import bound
from accelerate.launch.plan import LaunchPlan, Resolved, worker_environment

# Those of this folder.
_MODULES = ("single", "local")
# What ends a program that does nothing about it, and what the launcher forwards.
_STOPPING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_FORWARDED = [*_STOPPING, *(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))]


@dataclass(frozen=True)
class Process:
    """What a plan would start, once for each rank or once for all.

    Attributes:
        label: what it is to the run, such as "rank 3" or "job".
        is_call: `command` is a function and its arguments, and no program with the variables of this shell.
    """

    label: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    is_call: bool = False


def run(plan: LaunchPlan, replace: bool = False) -> None:
    """Run a plan to its end; `replace` becomes the process that is started, where that is possible.

    Raises LaunchError (nothing was started), subprocess.CalledProcessError (the one process, or the program that
    starts them all, failed), or torch's ChildFailedError and SignalException (one of several failed, a signal stopped
    them).
    """
    environment = worker_environment(plan, os.environ)
    print_info(plan, *plan.notes)
    module_for(plan).run(plan, environment, replace)


def process(plan: LaunchPlan) -> Process:
    """Return the process that a plan would start on this machine, or the command that starts processes elsewhere."""
    return module_for(plan).process(plan, worker_environment(plan, os.environ))


def module_for(plan: LaunchPlan) -> types.ModuleType:
    """Return the runner of a plan; it is imported when it is needed."""
    return module_of(plan.runner)


def asked_for(values: Mapping[str, Resolved], function: str) -> str | None:
    """Return the runner of an extension whose option is set and which has a function of this name, or None."""
    runners = [name for spec in extension.all_specs() for name in spec.runners]
    names = [name for name in runners if name in values and values[name].value not in (None, False)]
    return next((name for name in names if hasattr(module_of(name), function)), None)


def module_of(name: str) -> types.ModuleType:
    """Return the runner of a name, imported on first use; LaunchError if neither the core nor an extension has it."""
    if name in _MODULES:
        return importlib.import_module(f"accelerate.launch.runners.{name}")
    for specs in (extension.specs, extension.third_parties):
        for spec in specs():
            if name in spec.runners:
                return importlib.import_module(spec.runners[name])
    raise LaunchError(f"No runner is called {name!r}: the extension that has it is not installed.")


def print_info(plan: LaunchPlan, *lines: str, always: bool = False) -> None:
    """Print lines of information, without a prefix here, unless the plan is quiet; `always` overrides that."""
    if always or not plan["quiet"]:
        to_stderr("".join(f"{PREFIX}{line}\n" for line in lines))


def start(
    command: Sequence[str], environment: Mapping[str, str], replace: bool = False, stopped_is_failed: bool = False
) -> None:
    """Run a program to its end, or become it (not on Windows, where the shell would take the launcher for ended).

    `stopped_is_failed` does not believe a program that was stopped and ends with status 0. Raises CalledProcessError.
    """
    if replace and sys.platform != "win32":
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # a daemon's may be closed, or None
                stream.flush()
        os.execvpe(command[0], list(command), dict(environment))
    process = subprocess.Popen(bound(command), env=dict(environment))
    with _signals_forwarded(process) as came:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # The terminal has interrupted the child as well; let it finish what it does then. Once more kills it.
            if not _in_foreground():
                process.send_signal(getattr(signal, "CTRL_C_EVENT", signal.SIGINT))
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()
            process.kill()
            process.wait()
            raise
    if not status and stopped_is_failed:
        status = next((-number for number in came if number in _STOPPING), 0)
    if status:
        raise subprocess.CalledProcessError(status, list(command))


def _in_foreground() -> bool:
    """Return whether Ctrl-C in the terminal reaches both this process and its child."""
    if os.name != "posix":
        return True  # a console of Windows reaches all its processes
    try:
        with open(os.ctermid(), "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def _signals_forwarded(process: subprocess.Popen) -> Iterator[list[int]]:
    """Send the child what stops this process, or what its user sends; yield the list of what came."""
    came: list[int] = []

    def forward(number: int, frame: types.FrameType | None) -> None:
        came.append(number)
        process.send_signal(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        # What is ignored (as `nohup` does with SIGHUP), the child ignores as well.
        heard = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, forward) for number in heard}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
