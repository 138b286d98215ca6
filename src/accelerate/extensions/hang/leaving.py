"""A rank's records for the launcher and for `accelerate diagnose` when a wait for other ranks times out."""

import contextlib
import faulthandler
import os
import sys
from pathlib import Path

from accelerate.runtime import failure


class RunHung(RuntimeError):
    """All ranks have ended themselves because a wait for others timed out."""


def write_report(report: str) -> None:
    """Leave the report of ranks that wait where `accelerate diagnose` finds it; an empty one removes it."""
    if failure.is_rank():
        path = failure.beside(os.environ[failure.ERROR_FILE], failure.HANG)
        with contextlib.suppress(OSError):
            Path(path).write_text(f"{report}\n", "utf-8") if report else os.unlink(path)


def leave_hung(report: str) -> None:
    """Leave the report and the stacks of all threads to the launcher; an error that ends this process from now on ends it as hung."""
    sys.excepthook = lambda *error: os._exit(failure.HUNG)  # the connections of the others are closed by then
    if failure.is_rank():
        error_file = os.environ[failure.ERROR_FILE]
        with (
            contextlib.suppress(OSError),
            open(failure.beside(error_file, failure.STACKS), "a", encoding="utf-8") as file,
        ):
            faulthandler.dump_traceback(file)
        with contextlib.suppress(Exception):
            record = failure.record(RunHung, RunHung(report), None)
            failure.leave(error_file, {**record, "traceback": report, "status": failure.HUNG})
