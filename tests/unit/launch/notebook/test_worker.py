"""The part that runs in the processes; here, in a forked child of the test."""

import json
import os
import signal
import sys
import traceback

import pytest

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch.notebook import failures, worker
from accelerate.launch.notebook.worker import Worker
from accelerate.runtime import storage

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def in_child(function, path):
    """Run a function in a forked child; return what it wrote down, and the exit status."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            (path / "told").write_text(json.dumps(function()))
            status = 0
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status if isinstance(status, int) else 98)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told = path / "told"
    return (json.loads(told.read_text()) if told.exists() else None), status


def test_a_forked_process_begins_afresh(tmp_path):
    storage.process.current["left"] = "behind"

    def child():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        seen = []

        def function():
            import torch

            seen.extend([
                dict(storage.process.current),
                torch.get_num_threads(),
                os.environ["FORK_LAUNCHED"],
                signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            ])  # fmt: skip

        Worker(function, str(tmp_path), forked=True)()
        return seen

    assert in_child(child, tmp_path) == ([{}, 1, "1", True, True], 0)


def test_a_fresh_process_keeps_its_threads(tmp_path):
    def child():
        import torch

        torch.set_num_threads(2)
        seen = []
        Worker(lambda: seen.extend([torch.get_num_threads(), os.environ.get("FORK_LAUNCHED")]), str(tmp_path), False)()
        return seen

    assert in_child(child, tmp_path) == ([2, None], 0)


@pytest.fixture
def here(monkeypatch):
    """Let a worker run in the tests' own process."""
    for name in ("_forget_handlers", "_end_with_the_parent"):
        monkeypatch.setattr(worker, name, lambda: None)
    monkeypatch.setenv("RANK", "3")


def test_failures_are_written_down_without_our_frames(here, tmp_path):
    def train(number):
        raise ValueError(number)

    with pytest.raises(ValueError, match="5"):
        Worker(train, str(tmp_path), False)(5)
    (failure,) = failures.written(str(tmp_path))
    assert failure.rank == 3
    assert failure.traceback.splitlines()[0] == "Traceback (most recent call last):"
    assert failure.traceback.splitlines()[1].endswith("in train")


def test_a_failure_before_the_function_is_written_down(here, tmp_path, monkeypatch):
    monkeypatch.setattr(Worker, "_begin_afresh", lambda self: [][1])
    with pytest.raises(IndexError):
        Worker(print, str(tmp_path), False)()
    assert "IndexError" in failures.written(str(tmp_path))[0].traceback


@pytest.mark.parametrize("code", [None, 0])
def test_an_end_without_a_fault_is_an_end(here, tmp_path, code):
    Worker(sys.exit, str(tmp_path), False)(code)
    assert failures.written(str(tmp_path)) == []


@pytest.mark.parametrize("code", [3, "text"])
def test_an_end_with_a_fault_is_a_failure(here, tmp_path, code):
    with pytest.raises(SystemExit):
        Worker(sys.exit, str(tmp_path), False)(code)
    assert f"SystemExit: {code}" in failures.written(str(tmp_path))[0].traceback


def test_a_run_that_has_saved_itself_has_not_failed(here, tmp_path):
    with pytest.raises(SystemExit):
        Worker(sys.exit, str(tmp_path), False)(PREEMPTED)
    assert failures.written(str(tmp_path)) == []


def test_an_interrupt_ends_the_process_with_a_status(here, tmp_path):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        Worker(interrupted, str(tmp_path), False)()
    assert caught.value.code == 130
    assert "KeyboardInterrupt" in failures.written(str(tmp_path))[0].traceback
