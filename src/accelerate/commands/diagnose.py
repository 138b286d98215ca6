"""`accelerate diagnose`: what the ranks of a run that hung or failed have left; `accelerate stacks`: where those of a running one are."""

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
# A rank writes its stacks at once, unless it is stopped or swapped out.
_PATIENCE_S, _LOOK_S = 3.0, 0.05


def diagnose_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate diagnose`, or add it to what `add_subparsers` returned."""
    description = "Print what the ranks of a run that hung or failed have left: the report, errors, and stacks."
    parser = make_parser("diagnose", description, subparsers, diagnose_command, allow_abbrev=False)
    parser.add_argument("folder", metavar="LOG_DIR", help="What was given to `accelerate launch --log_dir`.")
    return parser


def diagnose_command(args: argparse.Namespace) -> None:
    """Print what the last attempt in a folder has left.

    Raises:
        LaunchError: there is nothing of ranks below the folder.
    """
    found = [path for name in (failure.HANG, failure.STACKS, _ERRORS) for path in Path(args.folder).rglob(name)]
    if not found:
        raise LaunchError(
            f"Below {args.folder!r} no rank has left a report, an error or stacks. Name the folder of --log_dir."
        )
    attempt = max(found, key=lambda path: path.stat().st_mtime).parents[1]
    print(attempt)
    for rank in sorted(attempt.iterdir(), key=lambda path: path.name.zfill(9)):
        texts = {name: _text(rank / name) for name in (failure.HANG, _ERRORS, failure.STACKS, failure.FAULTS)}
        if texts[_ERRORS]:
            record = json.loads(texts[_ERRORS]).get(failure.OURS, {})
            hung = record.get("status") == failure.HUNG
            texts[_ERRORS] = "ended itself because some ranks waited in vain" if hung else record.get("traceback", "")
        for text in filter(None, map(str.strip, texts.values())):
            print(f"\n-- local rank {rank.name}\n{text}")


def _text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def stacks_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate stacks`, or add it to what `add_subparsers` returned."""
    description = (
        "Print the stacks of all threads of the ranks that your `accelerate launch` runs on this machine (Linux)."
    )
    parser = make_parser("stacks", description, subparsers, stacks_command, allow_abbrev=False)
    parser.add_argument("--pid", type=int, help="Ask this rank alone.")
    parser.add_argument("--job", type=int, help="Ask the ranks of this launcher alone: its process id.")
    return parser


def stacks_command(args: argparse.Namespace) -> None:
    """Ask ranks by a signal for their stacks, and print them; the kernel lets nobody but the owner of a process do that.

    Raises:
        LaunchError: no such rank runs here.
    """
    ranks = [each for each in _ranks() if args.pid in (None, each[0]) and args.job in (None, each[1])]
    if not ranks:
        raise LaunchError(
            "No rank of yours runs here under `accelerate launch` that answers, or none with this --pid or --job."
        )
    for pid, job, environment in ranks:
        file = Path(failure.beside(environment[failure.ERROR_FILE], failure.STACKS))
        size = file.stat().st_size
        os.kill(pid, failure.STACKS_SIGNAL)
        print(f"-- rank {environment.get('RANK', '?')}, pid {pid}, of the launcher {job}\n{_written(file, size)}")


def _written(file: Path, before: int) -> str:
    """Return what a rank adds to a file, when it has stopped to grow."""
    deadline, size = time.monotonic() + _PATIENCE_S, before
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        now = file.stat().st_size
        if now == size > before:
            return file.read_bytes()[before:].decode(errors="replace")
        size = now
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
