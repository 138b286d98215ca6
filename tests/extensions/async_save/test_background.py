"""One save at a time in the background; its error comes out of the next call."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from accelerate.checkpoint.storage import LocalStorage
from accelerate.extensions.async_save.background import Background, resting
from accelerate.runtime import durable


def test_an_error_comes_out_once_and_memory_comes_back():
    background = Background()
    memory = background.buffers.copy(torch.ones(3).untyped_storage())
    background.start(lambda: 1 / 0, "runs/checkpoint_3")
    with pytest.raises(RuntimeError, match="runs/checkpoint_3.*division by zero") as caught:
        background.start(lambda: None, "next")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert background.buffers.copy(torch.ones(3).untyped_storage()).data_ptr() == memory.data_ptr()
    background.finish()


def test_a_thread_that_rests_does_so_until_somebody_waits(tmp_path, monkeypatch):
    hurry, rests = threading.Event(), []
    monkeypatch.setattr(hurry, "wait", lambda seconds: rests.append(seconds) or (len(rests) == 3 and hurry.set()))
    with resting(3.0, hurry), durable.durable(tmp_path / "f") as file:
        file.write(os.urandom(48 << 20))
    assert len(rests) == 3 and all(seconds >= 0 for seconds in rests)


def test_a_wait_that_is_interrupted_is_no_wait(monkeypatch):
    background, go, done = Background(), threading.Event(), []
    background.start(lambda: (go.wait(20), done.append(1)), "x")
    with monkeypatch.context() as patch:

        def interrupted(*args):
            raise KeyboardInterrupt

        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            background.finish()
    assert not done
    threading.Timer(0.05, go.set).start()
    background.finish()
    assert done == [1]


def test_an_interpreter_that_starts_no_more_threads(monkeypatch):
    background, done = Background(), []

    def none(self):
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", none)
    background.start(lambda: done.append("written"), "x")
    assert done == ["written"]


# Imports once; each case is a fork that ends as a program does, and says on its last line how it did.
PROGRAM = """
import atexit, gc, os, sys, threading, torch
from accelerate import Accelerator
from accelerate.checkpoint import formats
base, hows = sys.argv[1], sys.argv[2:]
def full(*args, **kwargs):
    raise OSError(28, "No space left on device")
for how in hows:
    child = os.fork()
    if not child:
        break
    print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=":", flush=True)
else:
    sys.exit()
folder = os.path.join(base, how)
output = os.open(folder + ".txt", os.O_WRONLY | os.O_CREAT)
os.dup2(output, 1), os.dup2(output, 2)
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(300, 300))
if how in ("fails", "gone", "in a fork"):
    formats.write_torch = full
if how.startswith("late"):
    atexit.register(accelerator.save_state, folder, blocking=how == "latest")
else:
    atexit.register(print, "the program's own end", flush=True)
    accelerator.save_state(folder, blocking=False)
if how == "raises":
    raise ValueError("training failed")
if how in ("gone", "in a fork"):
    for thread in threading.enumerate():  # it may have ended
        if thread.name == "accelerate-checkpoint":
            thread.join()
if how == "gone":
    del accelerator, model
    gc.collect()
if how == "in a fork" and os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_the_end_of_a_program(tmp_path):
    """A save that is being written, or begins, comes to its end; one that fails must not look like success."""
    ends = {"ends": 0, "raises": 1, "late": 0, "latest": 0, "fails": 1, "gone": 1}
    ends["in a fork"] = 0  # the failure is the parent's, which reports it
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *ends]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended
    statuses = dict(line.rsplit(":", 1) for line in ended.stdout.splitlines())
    for how, status in ends.items():
        said = (tmp_path / f"{how}.txt").read_text()
        assert int(statuses[how]) == status, (how, said)
        there = how not in ("fails", "gone", "in a fork")
        assert (LocalStorage(tmp_path / how).state().kind == "complete") is there, (how, said)
        assert ("No space left" in said) is not there, (how, said)
        assert how.startswith("late") or "the program's own end" in said, (how, said)
