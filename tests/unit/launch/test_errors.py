"""Whose traceback is shown, what is said about the others, and the exit status; real launches are in tests/distributed."""

import subprocess
import types

import pytest

from accelerate.launch.errors import Reporter, endings_of, failure_of
from cases import cases

CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


class ChildError(Exception):
    def __init__(self, **ended):
        self.failures = {int(name[1:]): failure for name, failure in ended.items()}


class SignalError(Exception):
    sigval = 15


def ended(code, summary=None, time=0.0, *, stopped=False, fault="", **told):
    """A stand-in for torch's ProcessFailure, with what our agent has seen."""
    data = {"message": "x"}
    if summary is not None:
        record = {"summary": summary, "traceback": f"Traceback of {summary}\n{summary}\n", "where": "a.py:3 in main"}
        data["accelerate"] = {**record, "time": time, "host": "here", **told}
    died = None if stopped else time
    return types.SimpleNamespace(pid=7, exitcode=code, error_file_data=data, died=died, fault=fault, timestamp=99)


@cases(
    "error, status, fragment",
    (ChildError(r1=ended(3)), 3, "rank 1 (pid 7) failed with exit status 3; its own messages stand above"),
    (ChildError(r1=ended(1, "E")), 1, "rank 1 (pid 7) failed with exit status 1; its traceback stands above"),
    (ChildError(r0=ended(-9)), 137, "was killed by SIGKILL"),
    (SignalError(), 143, "stopped by SIGTERM"),
    (subprocess.CalledProcessError(-15, ["x"]), 143, "SIGTERM"),
    (KeyboardInterrupt(), 130, "interrupted"),
    # A rank that the launcher stopped while it was on its way out has failed without a signal.
    (ChildError(r0=ended(-15, "E", 1.0, stopped=True), r1=ended(1, CLOSED, 1.1)), 1, "rank 0 (pid 7) failed with"),
    (
        ChildError(r0=ended(-15, "KeyboardInterrupt", 1.0, stopped=True, interrupt=True), r1=ended(1, CLOSED, 1.1)),
        1,
        "rank 0 (pid 7) failed with exit status 1;",
    ),
    (ChildError(r0=ended(75, time=1.0), r1=ended(-15, stopped=True)), 75, "it has saved itself"),
    (subprocess.CalledProcessError(75, ["x"]), 75, "it has saved itself"),
)
def test_failures_become_a_status_and_a_line(error, status, fragment):
    assert failure_of(error)[0] == status and fragment in failure_of(error)[1]


def test_foreign_errors_stay_errors():
    for error in (ZeroDivisionError(), type("E", (Exception,), {"failures": (1, 2)})()):
        with pytest.raises(type(error)):
            failure_of(error)


@cases(
    "first, ranks",
    # The clock decides between two of the same kind.
    (1, {"r0": ended(1, "A", 2.0), "r1": ended(1, "B", 1.5)}),
    # One that was killed leaves no time; the other's connection broke because of it, whatever the clock says.
    (1, {"r0": ended(1, CLOSED, 1.0), "r1": ended(-9, time=1.1)}),
    # Whom the launcher stopped did not fail, whichever rank that was.
    (1, {"r0": ended(-15, time=1.0, stopped=True), "r1": ended(3, time=2.0)}),
    # But one that had left its traceback before that had failed.
    (0, {"r0": ended(-15, "ValueError: x", 1.0, stopped=True), "r1": ended(1, CLOSED, 1.1)}),
    # Where all of them lost a peer, the first one stands for them.
    (1, {"r0": ended(1, CLOSED, 2.0), "r1": ended(1, CLOSED, 1.0)}),
)
def test_who_failed_first(first, ranks):
    assert endings_of(ChildError(**ranks).failures)[0].rank == first


@pytest.fixture
def report():
    written = []

    def report(quiet=False, attempt=1, attempts=1, **ranks):
        Reporter(quiet, written.append).failed(ChildError(**ranks).failures, attempt, attempts)
        return "".join(written)

    return report


def test_one_traceback_and_a_line_for_each_other(report):
    text = report(
        **{f"r{rank}": ended(1, "ValueError: x", time) for rank, time in enumerate((2.0, 1.0, 3.0, 3.0))},
        r4=ended(1, "KeyError: 'y'", 3.0),
        r5=ended(1, CLOSED, 3.0),
        r6=ended(4, time=3.0),
        r7=ended(-15, time=3.0, stopped=True),
        r8=ended(-9, time=3.0, stopped=True),
    )
    assert text == (
        "accelerate launch: rank 1 on here failed:\n"
        "Traceback of ValueError: x\nValueError: x\n"
        "accelerate launch: ranks 0, 2, 3 failed with the same error.\n"
        "accelerate launch: rank 4 failed as well, with another error: KeyError: 'y' (a.py:3 in main)\n"
        "accelerate launch: rank 6 failed with exit status 4.\n"
        f"accelerate launch: rank 5 failed because another rank had gone: {CLOSED}\n"
        "accelerate launch: ranks 7, 8 ended because the launcher stopped the run.\n"
    )


IN_ATTEMPT_1 = (
    "rank 0 on here failed in attempt 1 of 3:\nTraceback of E\nE\nrank 0 (pid 7) failed with exit status 1.\n"
)
KILLED = "rank 0 was killed by SIGKILL: the kernel did that because memory ran out, or another program; the launcher did not.\n"


@cases(
    "how, ranks, text",
    ({"quiet": True}, {"r0": ended(1, "E", 1.0), "r1": ended(1, "E", 2.0)}, "Traceback of E\nE\n"),
    # A hook of the program has printed it.
    ({}, {f"r{n}": ended(1, "E", 1.0 + n, shown=True) for n in (0, 1)}, "rank 1 failed with the same error.\n"),
    ({}, {"r0": ended(-11, fault="Segmentation fault\n")}, "rank 0 failed:\nSegmentation fault\n"),
    ({"attempts": 3}, {"r0": ended(1, "E", 1.0)}, IN_ATTEMPT_1),
    ({}, {"r0": ended(-9, time=1.0)}, KILLED),
    ({}, {"r0": ended(75, time=1.0), "r1": ended(75, time=1.0)}, ""),
)
def test_other_endings(report, how, ranks, text):
    assert report(**how, **ranks).replace("accelerate launch: ", "") == text


def test_a_process_that_does_not_end_is_shown_once(monkeypatch):
    written = []
    reporter = Reporter(write=written.append)
    told = ended(1, "ValueError: x", 1.0).error_file_data["accelerate"]
    reporter.lingers(2, told)
    reporter.lingers(2, told)
    reporter.failed({2: ended(1, "ValueError: x", 1.0)}, 1, 1)
    text = "".join(written)
    assert text.count("Traceback of") == 1 and "rank 2 on here has failed, and does not end:" in text
    reporter.started(2, 2)  # the next attempt is another matter
    reporter.failed({2: ended(1, "ValueError: x", 1.0)}, 2, 2)
    assert "".join(written).count("Traceback of") == 2
