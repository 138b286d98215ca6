"""`accelerate diagnose` prints the records of a run that hung or failed; `accelerate stacks` prints the stacks of a running one."""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.commands.utils import make_parser
from accelerate.launch.errors import LaunchError
from accelerate.runtime import failure

_ERRORS = "error.json"
# The suffix that torch's launcher adds to the name of a run: an underscore and eight letters.
_RANDOM = 9
_SHOWN = 2000  # characters of a damaged file
# A rank writes its stacks at once, unless it is stopped or swapped out.
_PATIENCE_S, _LOOK_S = 3.0, 0.05


def diagnose_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate diagnose`, or add it to what `add_subparsers` returned."""
    description = "Print the reports, errors and stacks that the ranks of a hung or failed run wrote."
    parser = make_parser("diagnose", description, subparsers, diagnose_command, allow_abbrev=False)
    parser.add_argument("folder", metavar="LOG_DIR", help="What was given to `accelerate launch --log_dir`.")
    return parser


def diagnose_command(args: argparse.Namespace) -> None:
    """Print the records of the last attempt in a folder, of all machines that write there; damaged files are named and skipped.

    Raises:
        LaunchError: no rank has written anything below the folder.
    """
    paths = [path for name in (failure.HANG, failure.STACKS, _ERRORS) for path in Path(args.folder).rglob(name)]
    if not paths:
        raise LaunchError(f"Below {args.folder!r} no rank has left anything. Name the folder that --log_dir named.")
    # An attempt as often as it has files: the one whose file is the newest comes last.
    attempts = [path.parents[1] for path in sorted(paths, key=lambda path: path.lstat().st_mtime)]
    # Each machine of a run has a folder.
    last = {attempt.parent: attempt for attempt in attempts if _run(attempt) == _run(attempts[-1])}
    for attempt in sorted(last.values()):
        print(attempt)
        for rank in sorted(attempt.iterdir(), key=lambda path: path.name.zfill(9)):
            parts = (_text(rank / failure.HANG), _error(rank / _ERRORS))
            parts += (_text(rank / failure.STACKS), _text(rank / failure.FAULTS))
            for text in filter(None, map(str.strip, parts)):
                print(f"\n-- local rank {rank.name}\n{text}")


def _run(attempt: Path) -> str:
    """Return the common part of the folders of a run's machines: the name without the suffix of `tempfile`."""
    name = attempt.parent.name
    return name[:-_RANDOM] if name.startswith(failure.MACHINES) else name


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"


def _error(path: Path) -> str:
    text = _text(path)
    if not text:
        return ""
    try:
        record = dict(json.loads(text).get(failure.OURS) or {})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"{path.name} is damaged, and is not shown: {error}\n{text[:_SHOWN]}"
    hung = record.get("status") == failure.HUNG
    return "ended itself because some ranks waited too long" if hung else str(record.get("traceback", ""))


def stacks_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate stacks`, or add it to what `add_subparsers` returned."""
    description = "Print the stacks of all threads of your ranks on this machine (Linux, under `accelerate launch`)."
    parser = make_parser("stacks", description, subparsers, stacks_command, allow_abbrev=False)
    parser.add_argument("--pid", type=int, help="Ask this rank alone.")
    parser.add_argument("--job", type=int, help="Process id of the launcher whose ranks to ask.")
    return parser


def stacks_command(args: argparse.Namespace) -> None:
    """Ask ranks by a signal for their stacks, and print them; the kernel allows that only to the owner of a process.

    Raises:
        LaunchError: no such rank runs here.
    """
    ranks = [rank for rank in _ranks() if args.pid in (None, rank[0]) and args.job in (None, rank[1])]
    if not ranks:
        raise LaunchError(
            "No rank of yours that answers runs here under `accelerate launch` (with this --pid or --job)."
        )
    for pid, job, environment in ranks:
        file = Path(failure.beside(environment[failure.ERROR_FILE], failure.STACKS))
        try:
            size = file.stat().st_size
            os.kill(pid, failure.STACKS_SIGNAL)
            text = _written(file, size)
        except OSError as error:  # it has ended, or its folder was removed
            text = f"Its stacks cannot be read: {error}.\n"
        print(f"-- rank {environment.get('RANK', '?')}, pid {pid}, of the launcher {job}\n{text}")


def _written(file: Path, before: int) -> str:
    """Return a rank's addition to a file, once it has stopped growing."""
    deadline, size = time.monotonic() + _PATIENCE_S, before
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        current_size = file.stat().st_size
        if current_size == size > before:
            return file.read_bytes()[before:].decode(errors="replace")
        size = current_size
    return "It gives no answer: its process is stopped, or waits for a disk.\n"


def _ranks() -> Iterator[tuple[int, int, dict[str, str]]]:
    """Yield the process id, the launcher and the variables of each rank that answers the signal."""
    import psutil

    for process in psutil.process_iter():
        try:
            environment, job = process.environ(), process.ppid()
            status = _text(Path(f"/proc/{process.pid}/status"))
        except (psutil.Error, OSError):  # another user's, or it has ended
            continue
        caught = int(status.partition("SigCgt:")[2].split(maxsplit=1)[0], 16) if "SigCgt:" in status else 0
        answers = failure.STACKS_SIGNAL and caught >> (failure.STACKS_SIGNAL - 1) & 1  # else the signal would end it
        if answers and environment.get(failure.LAUNCHER) == str(job) and environment.get(failure.ERROR_FILE):
            yield process.pid, job, environment
