"""What runs in the processes of a function, how functions reach them, and their output."""

import functools
import importlib.util
import io
import json
import linecache
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import types

import pytest
import torch

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch import notebook_worker
from accelerate.launch.notebook import Request
from accelerate.launch.notebook_worker import CannotSendError, Worker, resolvable_forks, sendable, write_whole_lines
from accelerate.runtime import storage

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture
def error_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return tmp_path / "error.json"


@pytest.fixture
def here(error_file, monkeypatch):
    """Let a worker run in the tests' own process; return what it leaves."""
    monkeypatch.setattr(notebook_worker, "_end_with_the_parent", lambda: None)
    monkeypatch.setenv("RANK", "3")
    return lambda: json.loads(error_file.read_text())["accelerate"] if error_file.exists() else None


def in_child(function, path):
    """Run a function in a forked child; return what it wrote down, and the exit status."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            (path / "seen").write_text(json.dumps(function()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return (json.loads((path / "seen").read_text()) if status == 0 else None), status


@pytest.mark.parametrize("forked", [True, False])
def test_a_forked_process_begins_afresh(tmp_path, forked):
    def child():
        storage.process.current["left"] = "behind"
        torch.set_num_threads(2)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        seen = []

        def function():
            handlers = [
                signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            ]
            threads = torch.get_num_threads()
            seen.extend([dict(storage.process.current), threads, os.environ.get("FORK_LAUNCHED"), handlers])

        Worker(function, forked)()
        return seen

    expected = [{}, 1, "1", [True, True]] if forked else [{}, 2, None, [False, False]]
    assert in_child(child, tmp_path) == (expected, 0)


def test_a_failure_leaves_its_traceback_without_frames_of_the_launcher(here):
    def train(number):
        raise ValueError(number)

    with pytest.raises(SystemExit) as caught:
        Worker(train, False)(5)
    record = here()
    assert (caught.value.code, record["rank"], record["summary"]) == (1, 3, "ValueError: 5")
    lines = record["traceback"].splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[1].endswith("in train")


def test_a_failure_before_the_function_and_one_whose_text_fails_are_left(here, monkeypatch):
    class Rude(Exception):
        def __str__(self):
            raise RuntimeError("no")

    def fail():
        raise Rude

    for broken in (lambda: [][1], fail):
        monkeypatch.setattr(notebook_worker, "write_whole_lines", broken)
        with pytest.raises(SystemExit):
            Worker(print, False)()
    assert "Rude" in here()["traceback"]


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [(None, None, None), (0, None, None), (3, 3, "SystemExit: 3"), ("x", "x", "SystemExit: x"), (PREEMPTED,) * 2 + (None,)],
)  # fmt: skip
def test_ends_with_and_without_a_fault(here, code, status, text):
    if status is None:
        Worker(sys.exit, False)(code)
    else:
        with pytest.raises(SystemExit) as caught:
            Worker(sys.exit, False)(code)
        assert caught.value.code == status
    assert (text in here()["traceback"]) if text else here() is None


def test_an_interrupt_ends_the_process_with_a_status(here):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        Worker(interrupted, False)()
    assert caught.value.code == 130 and here()["interrupt"]


def test_a_full_disk_and_output_that_is_gone_hide_no_error(here, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "no such directory/error.json")
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    with pytest.raises(SystemExit):
        Worker(lambda: [][1], False)()


# -- how functions reach fresh processes ---------------------------------------------------------------------------------

LOCK = threading.Lock()


def importable(value=None):
    return value


def uses_a_lock():
    with LOCK:
        pass


@pytest.fixture
def cells(monkeypatch):
    """A main program that no other process can import, with a function in it."""
    main = types.ModuleType("__main__")
    main.__spec__ = None
    text = "def in_a_cell(queue):\n    queue.append(helper())\n\ndef helper():\n    return 3\n\nclass Settings:\n    rate = 4\n"
    linecache.cache["cell"] = (len(text), None, text.splitlines(True), "cell")
    exec(compile(text, "cell", "exec"), vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    yield main
    linecache.cache.pop("cell", None)


@pytest.mark.parametrize("function", [importable, functools.partial(importable), print, uses_a_lock])
def test_importable_functions_go_by_name_with_tensors_and_queues(function):
    queue = multiprocessing.get_context("spawn").Queue()
    args = () if function is uses_a_lock else (torch.ones(2), queue)[:1]
    request = sendable(Request(function, args))
    assert request.function is function and request.args == args
    assert sendable(Request(importable, (queue,))).function is importable
    queue.close()


def test_functions_and_classes_of_cells_and_lambdas_go_by_value(cells):
    pytest.importorskip("cloudpickle")
    request = sendable(Request(cells.in_a_cell, ([],)))
    assert (request.args, request.function.__name__) == ((), "in_a_cell")
    sent = pickle.dumps(request.function)
    del linecache.cache["cell"]
    pickle.loads(sent)()  # with a list of its own
    assert linecache.cache["cell"][2][0] == "def in_a_cell(queue):\n"  # for the lines of a traceback
    cells.Settings.__module__ = "__main__"
    assert sendable(Request(importable, (cells.Settings(),))).args == ()
    seen = []
    sendable(Request(lambda: seen.append(1))).function()
    assert seen == []  # it was a copy


def test_what_cannot_be_sent_is_named(cells, monkeypatch):
    pytest.importorskip("cloudpickle")
    lock = threading.Lock()
    with pytest.raises(CannotSendError, match=r"The reason is lock, a lock"):
        sendable(Request(lambda: lock.acquire()))
    with pytest.raises(CannotSendError, match=r"The reason is args\[0\], a lock"):
        sendable(Request(importable, (lock,)))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cloudpickle" else find(name))
    with pytest.raises(CannotSendError, match=r"in_a_cell cannot be sent.*a cell.*pip install cloudpickle.*\.py file"):
        sendable(Request(cells.in_a_cell, ([],)))
    cells.__file__ = __file__  # a script, which a fresh process imports
    assert sendable(Request(importable)).function is importable


# -- output --------------------------------------------------------------------------------------------------------------


class Pieces:
    """A stream that keeps what it is given, piece by piece."""

    interrupts = False

    def __init__(self):
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        if self.interrupts:
            raise KeyboardInterrupt

    def flush(self):
        pass

    def isatty(self):
        return False


def test_a_notebook_gets_whole_lines_and_progress_bars_move(monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream := Pieces())
    write_whole_lines()
    print("a", 1, "ü")
    print("no end", end="")
    assert stream.pieces == ["a 1 ü\n"]
    sys.stdout.flush()
    assert stream.pieces[1:] == ["no end"]
    sys.stdout.write("\r10%")
    assert stream.pieces[-1] == "\r10%" and not sys.stdout.isatty()
    wrapped = sys.stdout
    write_whole_lines()
    assert sys.stdout is wrapped


def test_an_interrupt_does_not_repeat_a_line(monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream := Pieces())
    write_whole_lines()
    stream.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        print("once")
    stream.interrupts = False
    sys.stdout.flush()
    assert stream.pieces == ["once\n"]


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


def test_output_into_files(error_file, tmp_path):
    def child():
        Worker(lambda: os.write(2, b"raw\n") and print("printed"), forked=True, to_files=True)()

    assert in_child(child, tmp_path)[1] == 0
    assert (tmp_path / "stdout.log").read_text() == "printed\n" and (tmp_path / "stderr.log").read_text() == "raw\n"


# -- forks that can look up names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stuck", "forks"), [(0, 1), (2, 3), (99, 4)])
def test_a_child_that_could_not_look_up_names_is_replaced(monkeypatch, stuck, forks):
    begun, before = [], os.fork

    def counted():
        begun.append(None)
        begun[-1] = before()
        return begun[-1]

    probe = lambda: threading.Event().wait() if len(begun) <= stuck else None  # noqa: E731
    monkeypatch.setattr(notebook_worker.ctypes, "CDLL", lambda name: types.SimpleNamespace(__res_init=probe))
    monkeypatch.setattr(notebook_worker, "_LOCK_S", 0.05)
    monkeypatch.setattr(notebook_worker, "_FORKS", 3)
    monkeypatch.setattr(os, "fork", counted)
    with resolvable_forks():
        child = os.fork()
        if child == 0:
            os._exit(7 if os.fork is counted or stuck == 99 else 8)
    assert os.fork is counted
    assert (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(begun)) == (7, forks)
    for other in begun:  # none is left behind
        with pytest.raises(ChildProcessError):
            os.waitpid(other, os.WNOHANG)


def test_the_real_lock_is_free_here_and_a_system_without_it_forks_as_ever(monkeypatch):
    with resolvable_forks():
        child = os.fork()
        if child == 0:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    fork = os.fork
    monkeypatch.setattr(notebook_worker.ctypes, "CDLL", lambda name: object())
    with resolvable_forks():
        assert os.fork is fork


def test_processes_of_a_start_that_fails_are_killed(monkeypatch):
    started = []

    def half_a_start(self, worker_group):
        process = multiprocessing.get_context("fork").Process(target=signal.pause)
        process.start()
        started.append(process)
        raise OSError("no more processes")

    monkeypatch.setattr(notebook_worker.elastic.Agent, "_start_workers", half_a_start)
    agent = notebook_worker.FunctionAgent.__new__(notebook_worker.FunctionAgent)
    with pytest.raises(OSError, match="no more"):
        agent._start_workers(None)
    assert started[0].exitcode == -signal.SIGKILL
