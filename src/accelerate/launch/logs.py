"""Where the output of several processes goes: what `--tee` and `--log_dir` mean, checked before anything is started."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping

from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import LaunchPlan, Source

# Seconds; a longer pause between two looks would outlast any patience, and a sleep has a limit of its own.
_LONGEST_INTERVAL_S = 3600.0
_HOW = "Write 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), for all processes or by local rank: 0:3,1:2."


def parse_tee(text: str, processes: int) -> dict[int, int]:
    """Return local rank to 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both): which streams of each process are copied into files.

    Args:
        text: a number for all processes, or numbers by local rank in torch's notation.
        processes: how many processes this machine runs.

    Raises:
        LaunchError: it is not of this form, or names a process that there is not.

    Example:
        >>> parse_tee("1", 2), parse_tee("1:3", 2)
        ({0: 1, 1: 1}, {0: 0, 1: 3})
    """
    text = str(text).strip()
    if re.fullmatch("[0-3]", text):
        return dict.fromkeys(range(processes), int(text))
    chosen = dict.fromkeys(range(processes), 0)
    for part in text.split(","):
        pair = re.fullmatch(r"\s*([0-9]{1,6})\s*:\s*([0-3])\s*", part)
        if pair is None:
            raise LaunchError(f"--tee is {text!r}. {_HOW}")
        if int(pair[1]) >= processes:
            raise LaunchError(
                f"--tee is {text!r}, and there is no local rank {int(pair[1])}: they go from 0 to {processes - 1}. {_HOW}"
            )
        chosen[int(pair[1])] = int(pair[2])
    return chosen


def streams(plan: LaunchPlan) -> dict[int, int]:
    """Return what `parse_tee` does, of a plan: a directory for logs without a choice of streams gets both."""
    tee = plan.settings["tee"]
    both = plan["log_dir"] is not None and tee.source is Source.DEFAULT
    return parse_tee("3" if both else tee.value, plan.local_processes)


def check(plan: LaunchPlan) -> None:
    """Check the options of the elastic launcher that are about watching and logging; nothing is made.

    Raises:
        LaunchError: one of them cannot be used; the message names it.
    """
    streams(plan)
    restarts, interval, role = (plan.settings[name] for name in ("max_restarts", "monitor_interval", "role"))
    if restarts.value < 0:
        raise LaunchError(f"--max_restarts is {restarts.value} ({restarts.origin}); it is a number from 0.")
    if not 0 < interval.value <= _LONGEST_INTERVAL_S:  # not a number is not in between either
        raise LaunchError(
            f"--monitor_interval is {interval.value} ({interval.origin}); it is a number of seconds above 0, up to "
            f"{_LONGEST_INTERVAL_S:g}."
        )
    if not str(role.value).strip() or not str(role.value).isprintable():
        raise LaunchError(f"--role is {role.value!r} ({role.origin}); it needs a name that can be printed.")
    if plan["log_dir"] is not None:
        _check_directory(plan["log_dir"], f"--log_dir is {plan['log_dir']!r} ({plan.settings['log_dir'].origin})")


def _check_directory(path: str, named: str) -> None:
    """Check that files can be written below a directory, which need not be there yet."""
    if not str(path).strip():
        raise LaunchError(f"{named}; it needs the name of a directory.")
    there = os.path.abspath(path)
    while not os.path.lexists(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise LaunchError(f"{named}, and {there} is not a directory. Name another one.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise LaunchError(f"{named}, and nothing may be written to {there}. Name another one.")


@contextlib.contextmanager
def directory(given: str | None) -> Iterator[str]:
    """Return a directory for the files of a run: the one that the user named, or a new one that is removed afterwards.

    Raises:
        LaunchError: the directory cannot be made.
    """
    if given is None:
        with tempfile.TemporaryDirectory(prefix="accelerate_launch_", ignore_cleanup_errors=True) as made:
            yield made
        return
    try:
        os.makedirs(given, exist_ok=True)
        os.rmdir(
            tempfile.mkdtemp(prefix="accelerate_", dir=given)
        )  # the sure way to learn whether it may be written to
    except OSError as error:
        raise LaunchError(
            f"--log_dir is {given!r}, which cannot be used: {error.strerror}. Name another one."
        ) from None
    yield given


@contextlib.contextmanager
def lines_at_once(chosen: Mapping[int, int]) -> Iterator[None]:
    """Pass on each line of the processes when it comes, if there are files: torch writes into a buffer, which a pipe would hold."""
    reconfigure = getattr(sys.stdout, "reconfigure", None) if any(chosen.values()) else None
    if reconfigure is None:
        yield
        return
    before = sys.stdout.line_buffering
    reconfigure(line_buffering=True)
    try:
        yield
    finally:
        reconfigure(line_buffering=before)
