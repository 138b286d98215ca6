"""What runs in the processes of a function, and their output."""

import functools
import io
import json
import multiprocessing
import os
import signal
import sys
import types

import pytest
import torch

from accelerate.launch import notebook
from accelerate.launch.notebook import Worker, write_whole_lines
from accelerate.runtime import storage
from accelerate.utils.constants import PREEMPTED

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """Run a function as a rank in a forked process; return its exit status, and what it has left."""
    error_file = tmp_path / "error.json"
    for name, value in {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "ROLE_NAME": "role",
        "TORCHELASTIC_ERROR_FILE": error_file,
    }.items():
        monkeypatch.setenv(name, str(value))

    def run(function, *args, prefix=None):
        worker = Worker(functools.partial(function, *args), prefix)
        worker.may_run.set()
        process = multiprocessing.get_context("fork").Process(target=worker)
        process.start()
        process.join(60)
        left = json.loads(error_file.read_text())["accelerate"] if error_file.exists() else None
        return process.exitcode, left

    return run


def test_a_forked_process_begins_afresh(ended, monkeypatch):
    def function():
        assert not storage.process.current and torch.get_num_threads() == 1 and os.environ["FORK_LAUNCHED"] == "1"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    monkeypatch.setitem(storage.process.current, "left", "behind")
    former = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert ended(function) == (0, None)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def test_no_rank_runs_before_all_are_forked(tmp_path):
    worker = Worker(lambda: (tmp_path / "ran").touch())
    process = multiprocessing.get_context("fork").Process(target=worker)
    process.start()
    process.join(0.5)
    assert process.is_alive() and not (tmp_path / "ran").exists()
    worker.may_run.set()
    process.join(30)
    assert process.exitcode == 0 and (tmp_path / "ran").exists()


def test_a_failure_leaves_its_traceback_without_frames_of_the_launcher(ended):
    def train(number):
        raise ValueError(number)

    status, record = ended(train, 5)
    assert (status, record["rank"], record["summary"]) == (1, 3, "ValueError: 5")
    lines = record["traceback"].splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[1].endswith("in train")


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [(None, 0, None), (3, 3, "SystemExit: 3"), ("x", 1, "SystemExit: x"), (PREEMPTED, PREEMPTED, None)],
)
def test_ends_with_and_without_a_fault(ended, code, status, text):
    found, record = ended(sys.exit, code)
    assert found == status and (record is None if text is None else text in record["traceback"])


# -- output --------------------------------------------------------------------------------------------------------------


def test_a_notebook_gets_whole_lines_and_progress_bars_move(monkeypatch):
    pieces = []
    stream = types.SimpleNamespace(write=pieces.append, flush=lambda: None, isatty=lambda: False)
    monkeypatch.setattr(sys, "stdout", stream)
    write_whole_lines()
    print("a", 1, "ü")
    print("no end", end="")
    assert pieces == ["a 1 ü\n"]
    sys.stdout.flush()
    print("\r10%", end="", flush=True)
    assert pieces[1:] == ["no end", "\r10%"] and not sys.stdout.isatty()


def test_consoles_are_left_alone_unless_they_are_unbuffered(monkeypatch):
    raw, plain = io.BytesIO(), io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stderr", plain)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, write_through=True))
    write_whole_lines()
    assert sys.stderr is plain
    print("a", 1, end="")
    assert raw.getvalue() == b""
    print()
    assert raw.getvalue() == b"a 1\n"
    monkeypatch.setattr(sys, "stdout", None)
    write_whole_lines()
    assert sys.stdout is None


def test_lines_get_a_prefix_of_the_rank(ended, monkeypatch, tmp_path):
    with open(tmp_path / "out", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert ended(lambda: print("a", 1, "\n\nb", end=""), prefix="[${role_name} ${rank} ${local_rank} $1] ")[0] == 0
    prefix = "[role 3 1 $1] "
    assert (tmp_path / "out").read_text() == f"{prefix}a 1 \n{prefix}\n{prefix}b"


def test_processes_of_a_start_that_fails_are_killed(monkeypatch):
    started = []

    def half_a_start(self, worker_group):
        process = multiprocessing.get_context("fork").Process(target=signal.pause)
        process.start()
        started.append(process)
        raise OSError("no more processes")

    monkeypatch.setattr(notebook.elastic.Agent, "_start_workers", half_a_start)
    agent = notebook.FunctionAgent.__new__(notebook.FunctionAgent)
    group = types.SimpleNamespace(spec=types.SimpleNamespace(entrypoint=Worker(print)))
    with pytest.raises(OSError, match="no more"):
        agent._start_workers(group)
    assert started[0].exitcode == -signal.SIGKILL
