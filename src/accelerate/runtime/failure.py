"""A rank that fails leaves its traceback for the launcher, which shows one of them instead of all ranks at once.

`accelerate launch` names itself in a variable, and torch's elastic launcher gives each rank an error file. With both, an
uncaught exception is written to that file, in the format of `torch.distributed.elastic`'s `record` plus our own part, and
the launcher prints it. Without the launcher, or if the file cannot be written, the traceback is printed as usual. Processes
that a rank starts, threads, and programs that never import this package also print it.

An Accelerator explains some errors. Its explanation follows the traceback, with a launcher and without one.

Source:
    https://docs.pytorch.org/docs/stable/elastic/errors.html
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

# Set by the launcher: its process id. Only its own children leave their tracebacks to it.
LAUNCHER = "ACCELERATE_LAUNCHER_PID"
# Set by torch's elastic launcher for each rank.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# Our part of the error file.
OURS = "accelerate"
# Next to the error file: the stacks of the process's threads when the system killed it for a fault.
FAULTS = "fault.log"
# Next to it: this rank's reports of waiting ranks, and the stacks of all threads, on request.
HANG, STACKS = "hang.txt", "stacks.txt"
# With this begins the name of the folder in which a machine of several leaves such files; the run's name follows.
MACHINES = "accelerate_machines-"
# The status of ranks that ended themselves because they hung.
HUNG = 79
# Lets a rank write its stacks: a real-time signal, which no shell or system sends; 0 where there is none (macOS).
STACKS_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else 0
# Exit status of a run that saved a checkpoint after a signal and resumes when it is submitted again (EX_TEMPFAIL of sysexits.h).
PREEMPTED = 75
# A traceback may carry a tensor in words. Both ends of it matter.
_LONGEST = 200_000
_LONGEST_SUMMARY = 2_000

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_former: Hook | None = None  # None: this hook was not set
_explain: Callable[[BaseException], str] | None = None


def watch(explain: Callable[[BaseException], str] | None = None) -> None:
    """Leave what ends this process to the launcher, if it is one of the launcher's ranks.

    A hook that the program had set before is called as well, and prints in its own way. A later one replaces this one.
    `explain` returns what else to say about an error, with a launcher or without; an empty text is nothing.
    """
    global _former, _explain
    _explain = explain or _explain
    if _former is not None or not (_explain or is_rank()):
        return
    _former, sys.excepthook = sys.excepthook, _hook
    if is_rank():
        _watch_faults()


def is_rank() -> bool:
    """Return whether this process is a rank that our launcher has started."""
    return bool(os.environ.get(ERROR_FILE)) and os.environ.get(LAUNCHER) == str(os.getppid())


def _watch_faults() -> None:
    if not faulthandler.is_enabled():  # else it is the program's own choice
        with contextlib.suppress(OSError, ValueError):
            file = open(beside(os.environ[ERROR_FILE], FAULTS), "w", encoding="utf-8")  # noqa: SIM115 - for the process's life
            faulthandler.enable(file)  # which holds it
    if STACKS_SIGNAL and signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL:
        with contextlib.suppress(OSError, ValueError):
            file = open(beside(os.environ[ERROR_FILE], STACKS), "w", encoding="utf-8")  # noqa: SIM115 - as above
            faulthandler.register(STACKS_SIGNAL, file)


def beside(error_file: str, name: str) -> str:
    """Return where the rank with this error file writes something else."""
    return os.path.join(os.path.dirname(error_file), name)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    prints = _former is not sys.__excepthook__
    # The traceback must be printed in any case: this may run when memory or the disk is full.
    recorded = False
    with contextlib.suppress(Exception):
        recorded = is_rank() and leave(os.environ[ERROR_FILE], record(kind, error, trace, shown=prints))
    if prints or not recorded:
        _former(kind, error, trace)
        with contextlib.suppress(Exception):
            sys.stderr.write(_explained(error))


def _explained(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        return _explain(error) if _explain is not None else ""
    return ""


def record(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, shown: bool = False
) -> dict[str, Any]:
    """Return the launcher's record of an exception; `shown`: it is also printed by this process."""
    frames = traceback.extract_tb(trace)
    bare = traceback.TracebackException(kind, error, None)
    bare.__notes__ = None  # from Python 3.11 on they come after the line that is wanted
    summary = list(bare.format_exception_only())[-1].strip()
    where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return {
        "summary": _shortened(summary, _LONGEST_SUMMARY),
        "traceback": _shortened("".join(traceback.format_exception(kind, error, trace)), _LONGEST) + _explained(error),
        "where": where,
        "interrupt": issubclass(kind, KeyboardInterrupt),
        "rank": int(os.environ.get("RANK", "0")),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "shown": shown,
    }


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters are omitted ...\n{text[-half:]}"


def leave(path: str, report: Mapping[str, Any]) -> bool:
    """Write our part of an error file, and return True. The part of torch's `record` stays."""
    from accelerate.runtime.durable import written_whole

    data: Any = None
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        data = json.load(file)
    if not isinstance(data, dict) or "message" not in data:
        extra = {"py_callstack": report["traceback"], "timestamp": str(int(report["time"]))}
        data = {"message": {"message": report["summary"], "extraInfo": extra}}
    # The launcher may look at any moment, and torch's reader takes no half a file.
    with written_whole(path) as scratch, open(scratch, "w", encoding="utf-8") as file:
        json.dump({**data, OURS: report}, file)
    return True
