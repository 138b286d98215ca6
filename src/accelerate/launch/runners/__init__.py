"""Start what a plan says: one process in place of the launcher, or several under torch's elastic launcher."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import NoReturn

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch.env import worker_environment
from accelerate.launch.plan import LaunchPlan

PREFIX = "accelerate launch: "
_SAVED = (
    f"the run ended with exit status {PREEMPTED}: a signal came, and it has saved itself. Start it again to go on."
)


def run(plan: LaunchPlan, replace: bool = False) -> None:
    """Run a plan to its end.

    Args:
        plan: what is started.
        replace: become the process that is started, where that is possible: no parent stays behind, and the call does
            not return. Only for a process that has nothing else to do.

    Raises:
        subprocess.CalledProcessError: the one process failed.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: one of several processes failed.
        torch.distributed.elastic.multiprocessing.api.SignalException: a signal stopped them.
    """
    environment = worker_environment(plan, os.environ)
    tell(plan, *plan.notes)
    if plan.elastic:
        run_elastic(plan, environment)
    elif replace and os.name == "posix":
        become(plan.command, environment)
    else:
        run_child(plan.command, environment)


def tell(plan: LaunchPlan, *lines: str) -> None:
    """Print lines of information, unless the plan is quiet.

    Args:
        plan: what is started.
        lines: the lines, without a prefix.
    """
    if not plan["quiet"]:
        for line in lines:
            print(PREFIX + line, file=sys.stderr, flush=True)


def become(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by a command.

    Args:
        command: program and arguments; the program is looked up on the PATH.
        environment: all variables.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], command, dict(environment))


def run_child(command: list[str], environment: Mapping[str, str]) -> None:
    """Run a command and wait for it; signals that stop this process stop it too.

    Args:
        command: program and arguments.
        environment: all variables.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    process = subprocess.Popen(command, env=dict(environment))
    with _forwarded(process):
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # The terminal has interrupted the child as well; let it finish what it does then.
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()
            process.kill()
            process.wait()
            raise
    if status:
        raise subprocess.CalledProcessError(status, command)


@contextlib.contextmanager
def _forwarded(process: subprocess.Popen) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, frame: types.FrameType | None) -> None:
        process.send_signal(number)

    names = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_elastic(plan: LaunchPlan, environment: Mapping[str, str]) -> None:
    """Run the processes of a plan under torch's elastic launcher.

    Args:
        plan: what is started.
        environment: all variables of the processes.

    Raises:
        ChildFailedError, SignalException: as in `run`.
    """
    with _without_collection():
        from accelerate.launch import elastic

    program, *arguments = plan.command
    with elastic.log_directory(plan["log_dir"]) as directory:
        config = elastic.make_config(
            plan.num_processes,
            plan.rendezvous,
            directory,
            tee=plan["tee"],
            role=plan["role"],
            max_restarts=plan["max_restarts"],
            monitor_interval=plan["monitor_interval"],
        )
        elastic.start(config, program, tuple(arguments), environment, verbose=bool(plan["debug"]))


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    # Importing torch makes many objects that live for ever; looking through them for garbage costs a tenth of the time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def failure_of(error: BaseException) -> tuple[int, str]:
    """Turn the failure of a run into an exit status and a line for people.

    Args:
        error: what `run` raised.

    Returns:
        The exit status of the process that failed first (128 plus the number of the signal that killed it), and which
        process that was.

    Raises:
        BaseException: the error itself, if it does not come from a process that was started.
    """
    if isinstance(error, subprocess.CalledProcessError):
        if error.returncode == PREEMPTED:
            return PREEMPTED, _SAVED
        return _status(error.returncode), f"the script {_ending(error.returncode)}."
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, "interrupted."
    if (number := getattr(error, "sigval", None)) is not None:
        return 128 + int(number), f"stopped by {signal.Signals(number).name}; all processes are gone."
    if hasattr(error, "get_first_failure"):
        rank, failure = error.get_first_failure()
        if failure.exitcode == PREEMPTED:
            return PREEMPTED, _SAVED
        line = (
            f"rank {rank} (pid {failure.pid}) {_ending(failure.exitcode)}; its own messages stand above, and the other "
            "ranks were stopped. --debug prints torch's report."
        )
        return _status(failure.exitcode), line
    raise error


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


def _ending(code: int) -> str:
    if code >= 0:
        return f"failed with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
