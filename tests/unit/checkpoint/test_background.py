"""One save at a time in the background; its error comes out of the next call."""

import logging
import pickle
import subprocess
import sys
import threading

import pytest

from accelerate.checkpoint.background import Background


def test_the_task_runs_beside_and_is_waited_for(caplog):
    background, go, done = Background(), threading.Event(), []
    background.start(lambda: (go.wait(20), done.append(1)), "first")
    assert background.busy and not done
    threading.Timer(0.05, go.set).start()
    with caplog.at_level(logging.WARNING):
        background.finish("the next save")
    assert done == [1] and not background.busy
    assert "the next save waits for the checkpoint first" in caplog.text and "waited" in caplog.text
    caplog.clear()
    background.finish("another")
    assert not caplog.text


def test_one_at_a_time():
    background, order = Background(), []
    for name in "ab":
        background.start(lambda name=name: order.append(name), name)
    background.finish()
    assert order == ["a", "b"]


def test_an_error_comes_out_once():
    background = Background()

    def fail():
        raise OSError("disk is full")

    background.start(fail, "runs/checkpoint_3")
    with pytest.raises(RuntimeError, match="runs/checkpoint_3.*disk is full") as told:
        background.start(lambda: None, "next")
    assert isinstance(told.value.__cause__, OSError)
    background.finish()


def test_memory_comes_back():
    background, released = Background(), []
    background.start(lambda: 1 / 0, "x", done=lambda: released.append(1))
    with pytest.raises(RuntimeError):
        background.finish()
    assert released == [1]


def test_who_is_interrupted_while_waiting_has_not_waited(monkeypatch):
    background, go = Background(), threading.Event()
    background.start(go.wait, "x")
    with monkeypatch.context() as patch:

        def interrupted(*args):
            raise KeyboardInterrupt

        patch.setattr(background._thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            background.finish()
    assert background.busy
    go.set()
    background.finish()
    assert not background.busy


def test_an_interpreter_that_starts_no_more_threads(monkeypatch):
    background, done = Background(), []

    def none(self):
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", none)
    background.start(lambda: done.append("written"), "x", done=lambda: done.append("done"))
    assert done == ["written", "done"] and not background.busy


PROGRAM = """
import gc, os, sys, atexit
from accelerate import Accelerator
from accelerate.checkpoint import formats
accelerator, folder, how = Accelerator(cpu=True), sys.argv[1], sys.argv[2]
if how == "fails":
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")
    formats.write_torch = full
    atexit.register(print, "the program's own end", flush=True)
    accelerator.save_state(folder, blocking=False)
elif how == "gone":
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")
    formats.write_torch = full
    accelerator.save_state(folder, blocking=False)
    accelerator._background._thread.join()
    del accelerator
    gc.collect()
elif how == "late":
    atexit.register(accelerator.save_state, folder, blocking=False)
elif how == "latest":
    atexit.register(accelerator.save_state, folder)
"""


@pytest.mark.parametrize(
    ("how", "status", "there"), [("fails", 1, False), ("gone", 1, False), ("late", 0, True), ("latest", 0, True)]
)
def test_the_end_of_a_program(tmp_path, how, status, there):
    """A save that fails then must not look like success; one that begins then comes to its end."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "c"), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == status, ended.stderr
    assert (tmp_path / "c" / "accelerate_manifest.json").exists() == there
    if status:
        assert "No space left" in ended.stderr
    if how == "fails":
        assert "the program's own end" in ended.stdout


def test_it_is_not_pickled_along():
    background = Background()
    background.start(lambda: None, "x")
    assert not pickle.loads(pickle.dumps(background)).busy
    background.finish()


@pytest.mark.parametrize("end", ["pass", "raise ValueError('training failed')"])
def test_a_process_that_ends_or_fails_finishes_its_save(tmp_path, end):
    code = f"""
import os, tempfile, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(300, 300))
accelerator.save_state({str(tmp_path / "c")!r}, blocking=False)
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) is (end == "pass"), done.stderr
    from accelerate.checkpoint.storage import LocalStorage

    assert LocalStorage(tmp_path / "c").state().kind == "complete", done.stderr
