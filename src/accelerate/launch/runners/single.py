"""One process: in place of the launcher, or as its child."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import NoReturn

from accelerate.launch.plan import LaunchPlan
from accelerate.launch.runners.base import Process

# What ends a program that does nothing about it.
_STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


def processes(plan: LaunchPlan, environment: Mapping[str, str]) -> list[Process]:
    """Return what `run` starts.

    Args:
        plan: what is started.
        environment: all variables of the process.
    """
    label = f"rank {plan.extra['RANK']}" if plan.num_processes > 1 and "RANK" in plan.extra else "the process"
    return [Process(label, tuple(plan.command), environment)]


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Run the one process of a plan.

    Args:
        plan: what is started.
        environment: all variables of the process.
        replace: become it, where the system can do that; the call does not return then.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    # On Windows the shell would take the replaced process for ended.
    if replace and sys.platform != "win32":
        become(plan.command, environment)
    else:
        run_child(plan.command, environment)


def become(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by a command.

    Args:
        command: program and arguments; the program is looked up on the PATH.
        environment: all variables.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:  # a daemon's may be closed
                stream.flush()
    os.execvpe(command[0], command, dict(environment))


def run_child(command: list[str], environment: Mapping[str, str], stopped_is_failed: bool = False) -> None:
    """Run a command and wait for it; signals that stop this process stop it too.

    Args:
        command: program and arguments.
        environment: all variables.
        stopped_is_failed: do not believe a command that was told to stop and then ends with status 0; the signal is
            its status then.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    process = subprocess.Popen(command, env=dict(environment))
    with _forwarded(process) as told:
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
        status = next((-number for number in told if number in _STOPPING), 0)
    if status:
        raise subprocess.CalledProcessError(status, command)


def _in_foreground() -> bool:
    """Tell whether Ctrl-C in the terminal reaches this process and its child alike."""
    if not hasattr(os, "tcgetpgrp"):
        return True  # Windows: the console tells all its processes
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


@contextlib.contextmanager
def _forwarded(process: subprocess.Popen) -> Iterator[list[int]]:
    told: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield told
        return

    def forward(number: int, frame: types.FrameType | None) -> None:
        told.append(number)
        process.send_signal(number)

    names = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # What is ignored (as `nohup` does with SIGHUP), the child ignores as well.
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
