"""Questions about where a thread of another rank is, asked and answered through a store within one process."""

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import types
import weakref

import pytest
import torch.distributed as dist

from accelerate.comm.torch_dist import operations_started
from accelerate.extensions.hang import hang, status, threads
from accelerate.extensions.hang.hang import Watcher
from accelerate.extensions.hang.status import Question
from accelerate.runtime import call_site


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(status, "INTERVAL_S", 0.02)
    monkeypatch.setattr(status, "STILL_S", 0.1)
    monkeypatch.setattr(hang, "_watcher", None)
    yield
    if hang._watcher is not None:
        hang._watcher.stop()


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def other_thread():
    """Run functions in threads that the test watches; whatever waits for `over` ends with the test."""
    threads = []

    def start(function, *arguments):
        threads.append(threading.Thread(target=function, args=arguments, daemon=True))
        threads[-1].start()
        return threads[-1]

    start.over = threading.Event()
    yield start
    start.over.set()
    for thread in threads:
        thread.join(10)


@pytest.fixture
def watched(store):
    """Watch threads as ranks, until the test ends."""
    watchers = []

    def start(rank, thread=None, world_size=2):
        watchers.append(Watcher(store, rank, world_size, thread))
        watchers[-1].start()
        return watchers[-1]

    yield start
    for watcher in watchers:
        watcher.stop()


def ask(store, ranks, world_size):
    """Return the answers of ranks, after a moment."""
    question = Question(store, ranks, world_size)
    while (answers := question.answers()) is None:
        time.sleep(0.001)
    return answers


def as_if_in(module, function):
    """Return a function that claims to belong to a module of torch."""
    code = function.__code__.replace(co_filename=f"{call_site._TORCH}{module}.py", co_name=function.__name__)
    return types.FunctionType(code, {**function.__globals__, "__name__": module}, function.__name__)


def test_standing_still_in_a_collective_is_waiting(store, watched, other_thread):
    lock = threading.Lock()
    lock.acquire()

    def barrier(lock):
        lock.acquire()

    watched(1, other_thread(as_if_in("torch.distributed.made_up", barrier), lock))
    deadline = time.monotonic() + 30
    while not (answer := ask(store, [1], 2)[1]).waits:
        assert time.monotonic() < deadline, answer
    lock.release()
    assert answer.operation == "barrier" and answer.blocked and "waits for other ranks" in str(answer)

    def compute(over):
        while not over.is_set():
            pass

    watched(0, other_thread(as_if_in("torch.distributed.made_up", compute), other_thread.over))
    answers, deadline = [answer], time.monotonic() + 30
    while any(answer.waits for answer in answers):  # a thread that gets no processor for a while looks as if it waited
        assert time.monotonic() < deadline, answers
        answers = [ask(store, [0], 2)[0] for _ in range(10)]
    assert answers[-1].operation == "compute"


def test_silence_is_told_from_an_end(store, watched):
    assert str(ask(store, [1], 2)[1]) == "gives no answer"
    watched(1).end()
    answer = ask(store, [1], 2)[1]
    assert answer.ended and answer.gone and str(answer) == "has ended"


@pytest.mark.skipif(not os.path.exists("/proc/self/ns/pid"), reason="processes are looked up in /proc")
def test_a_killed_process_is_seen_at_once(store):
    program = "from accelerate.extensions.hang.threads import process; import json; print(json.dumps(process()), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        dist.PrefixStore("accelerate/hang", store).set("rank/1", f'{{"process": {process.stdout.readline()}}}')
        silent = ask(store, [1], 2)[1]
        assert silent.alive and not silent.gone and "its process exists" in str(silent)
        process.kill()
        process.wait()
    dead = ask(store, [1], 2)[1]
    assert dead.alive is False and dead.gone and "killed" in str(dead)
    mine = threads.process()
    assert threads.exists({**mine, "machine": "elsewhere"}) is threads.exists({**mine, "machine": ""}) is None
    assert threads.exists({**mine, "started": "0"}) is False, "the number was given to another process since"


def test_counters_of_a_group(process_group):
    before = operations_started()
    dist.barrier()
    after = operations_started()
    assert before.keys() == after.keys() and len(after) == 1
    assert sum(after.values()) == sum(before.values()) + 1
    assert next(iter(after)).startswith("gloo:")


def test_a_watcher_ends_with_its_group():
    store = dist.HashStore()
    watcher = Watcher(store, 0, 2)
    watcher.start()
    del store
    gc.collect()
    watcher._thread.join(10)
    assert not watcher._thread.is_alive()
    watcher.end()  # no rank is left


class Broken:
    """A store whose connection is lost."""

    def __getattr__(self, name):
        raise RuntimeError("Connection was likely closed")


def test_a_lost_store_ends_the_thread_quietly(store, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    watcher = Watcher(store, 0, 2)
    monkeypatch.setattr(watcher, "_reach", Broken)
    watcher.start()
    watcher._thread.join(10)
    assert not watcher._thread.is_alive()
    watcher.end()
    assert caplog.text == ""


def test_a_forked_copy_leaves_no_word(store, watched, monkeypatch):
    watcher = watched(1)
    monkeypatch.setattr(watcher, "_pid", watcher._pid + 1)
    watcher.end()
    assert watcher._thread.is_alive() and not ask(store, [1], 2)[1].ended
    monkeypatch.undo()


def test_what_the_training_thread_held_goes_without_the_garbage_collector(store, watched):
    """A dict of all stacks holds the one that asked for it, too: each look kept gradients and gathered parameters."""

    class Gradient:
        pass

    def step():
        gradient = Gradient()
        assert ask(store, [1], 2)[1].answered
        return weakref.ref(gradient)

    watcher = watched(1)
    gc.collect()
    gc.disable()
    try:
        kept = step()
        watcher.stop()
        assert kept() is None
    finally:
        gc.enable()


def test_the_holder_of_the_store_ends_after_the_others_know(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(hang, "_LOOKS_AWAITED", 100)  # a busy machine may not run the other's thread for a second
    held = dist.TCPStore("127.0.0.1", 0, 1, True)
    store = dist.PrefixStore("group", held)
    assert hang._holds(store, 0) and not hang._holds(store, 1)
    first, second = Watcher(store, 0, 2), Watcher(store, 1, 2)
    first.start()
    second.start()
    first.end()
    assert second.closed
    second._thread.join(10)
    second.end()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not hang._holds(store, 0)
