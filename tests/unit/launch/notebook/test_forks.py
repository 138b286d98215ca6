"""Forked processes that can look up names."""

import os
import threading

import pytest

from accelerate.launch.notebook import forks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture
def forked(monkeypatch):
    """Fork once, and return the status of the child; `stuck` says whether the lock is held in the child that is numbered."""

    def run(stuck):
        begun = []
        before = os.fork

        def counted():
            begun.append(len(begun))
            return before()

        probe = lambda: threading.Event().wait() if stuck(begun[-1]) else None  # noqa: E731
        monkeypatch.setattr(forks, "_probe", lambda: probe)
        monkeypatch.setattr(os, "fork", counted)
        with forks.sound():
            child = os.fork()
            if child == 0:
                os._exit(7)
        assert os.fork is counted
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(begun)

    return run


def test_a_sound_child_is_taken(forked):
    assert forked(lambda number: False) == (7, 1)


def test_a_child_that_could_not_look_up_names_is_replaced(forked, monkeypatch):
    monkeypatch.setattr(forks, "_PATIENCE_S", 0.05)
    assert forked(lambda number: number < 2) == (7, 3)
    with pytest.raises(ChildProcessError):  # none is left behind
        os.waitpid(-1, os.WNOHANG)


def test_it_ends(forked, monkeypatch):
    monkeypatch.setattr(forks, "_PATIENCE_S", 0.01)
    assert forked(lambda number: True) == (7, forks._ATTEMPTS + 1)


def test_a_system_without_such_a_lock(monkeypatch):
    monkeypatch.setattr(forks, "_PROBE", "no_such_function")
    fork = os.fork
    with forks.sound():
        assert os.fork is fork


def test_the_real_lock_is_free_here():
    with forks.sound():
        child = os.fork()
        if child == 0:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
