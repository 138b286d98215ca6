"""Who failed first, and what the caller is told."""

import copy
import pickle
import signal
import time
import types

import pytest

from accelerate.launch.notebook import failures
from accelerate.launch.notebook.failures import Endings, WorkerError, WorkerFailure, build


class Process:
    def __init__(self, pid, exitcode=None):
        self.pid, self.exitcode = pid, exitcode

    def is_alive(self):
        return self.exitcode is None


def context(*exitcodes, attempt="0"):
    processes = [Process(100 + rank, code) for rank, code in enumerate(exitcodes)]
    environs = {rank: {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": attempt} for rank in range(len(processes))}
    return types.SimpleNamespace(_pc=types.SimpleNamespace(processes=processes), envs=environs)


def write(directory, monkeypatch, rank, error, at, attempt="0"):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
    monkeypatch.setattr(time, "time", lambda: at)
    try:
        raise error
    except type(error) as caught:
        failures.write(str(directory), caught, caught.__traceback__, rank)


def ranks(endings, directory, *reported):
    return [failure.rank for failure in endings.failures(str(directory), reported)]


def test_the_earliest_error_comes_first(tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, 0, ConnectionError("peer is gone"), 2.0)
    write(tmp_path, monkeypatch, 1, ValueError("the cause"), 1.0)
    endings = Endings()
    endings.look(context(1, 1))
    assert ranks(endings, tmp_path, WorkerFailure(0, 100, 1)) == [1, 0]


def test_an_error_counts_though_torch_stopped_its_process(tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, 0, ConnectionError("peer is gone"), 2.0)
    write(tmp_path, monkeypatch, 1, ValueError("the cause"), 1.0)
    endings = Endings()
    endings.look(context(1, None))
    first, second = endings.failures(str(tmp_path))
    assert (first.rank, first.exitcode, second.exitcode) == (1, None, 1)


def test_a_process_that_vanished_comes_before_the_errors_that_follow(tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, 0, ConnectionError("peer is gone"), 1.0)
    endings = Endings()
    endings.look(context(1, -signal.SIGKILL))
    assert ranks(endings, tmp_path, WorkerFailure(0, 100, 1)) == [1, 0]


def test_an_abort_follows_from_an_error(tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, 1, ValueError("the cause"), 1.0)
    endings = Endings()
    endings.look(context(-signal.SIGABRT, 1))
    assert ranks(endings, tmp_path) == [1, 0]


def test_who_was_stopped_has_not_failed(tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, 1, ValueError("the cause"), 1.0)
    endings, seen = Endings(), context(None, 1)
    endings.look(seen)
    seen._pc.processes[0].exitcode = -signal.SIGTERM
    assert ranks(endings, tmp_path) == [1]
    assert len(endings.processes) == 2


def test_earlier_attempts_do_not_count(tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, 0, ValueError("first attempt"), 1.0)
    write(tmp_path, monkeypatch, 1, ValueError("second attempt"), 2.0, attempt="1")
    endings = Endings()
    endings.look(context(1, None))
    endings.look(context(None, 1, attempt="1"))
    assert ranks(endings, tmp_path) == [1]


def test_nothing_was_started():
    Endings().look(types.SimpleNamespace(_pc=None))
    assert Endings().failures("nowhere") == ()


def test_half_a_file_is_no_failure(tmp_path):
    (tmp_path / "failure-0-0.json").write_text('{"rank": 0')
    (tmp_path / "failure-0-1.json").write_text("{}")
    assert failures.written(str(tmp_path)) == []


def test_what_the_error_says():
    first = WorkerFailure(3, 7, 1, "Traceback (most recent call last):\nValueError: bad\n", 1.0)
    error = build("train", (first, WorkerFailure(0, 8, -9)), "Look there.")
    assert str(error) == (
        "Rank 3 failed in train:\n\nTraceback (most recent call last):\nValueError: bad\n\n"
        "Others failed as well, which may follow from it:\n  rank 0: killed by SIGKILL\n\nLook there."
    )
    assert (error.rank, error.exitcode, error.traceback) == (3, 1, first.traceback)
    assert error._render_traceback_()[0].startswith("WorkerError: Rank 3 failed")


def test_the_error_can_be_copied_and_sent():
    error = build("train", (WorkerFailure(1, 2, 3),))
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(other), other.failures) == (str(error), error.failures)
    assert WorkerError("alone").rank is None


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (-9, "killed by SIGKILL. The system does that when memory runs out"),
        (-11, "killed by SIGSEGV. That is a fault in machine code"),
        (-7, "killed by SIGBUS. A full /dev/shm"),
        (-15, "killed by SIGTERM."),
        (-63, "killed by signal 63."),
        (3, "ended with exit status 3, and left no traceback"),
    ],
)
def test_processes_without_a_traceback(exitcode, words):
    assert words in str(build("train", (WorkerFailure(0, 5, exitcode),)))


def test_a_gpu_that_a_fork_has_spoiled():
    text = "RuntimeError: Cannot re-initialize CUDA in forked subprocess.\n"
    assert "GPU was used before the processes were forked" in str(build("train", (WorkerFailure(0, 5, 1, text),)))


def test_long_tracebacks_are_cut_in_the_middle(tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, 0, ValueError("start " + "x" * 200_000 + " end"), 1.0)
    (failure,) = failures.written(str(tmp_path))
    assert len(failure.traceback) < 40_000
    assert "start" in failure.traceback and failure.traceback.endswith(" end\n")


def test_an_error_whose_text_fails(tmp_path, monkeypatch):
    class Rude(Exception):
        def __str__(self):
            raise RuntimeError("no")

    write(tmp_path, monkeypatch, 0, Rude(), 1.0)
    assert "Rude" in failures.written(str(tmp_path))[0].traceback


def test_a_full_disk_hides_nothing():
    failures.write("no such directory", ValueError(), None)
