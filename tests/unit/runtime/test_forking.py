"""A fork waits for torch's threads, and for no others."""

import os

import pytest

from accelerate.runtime import rendezvous


@pytest.mark.parametrize(
    ("stat", "awake"),
    [
        (b"12 (pt_gloo_runloop) R 1 12", True),
        (b"12 (pt_gloo_runloop) D 1 12", True),
        (b"12 (pt_gloo_runloop) S 1 12", False),
        (b"12 (pt_nccl_watchdg) R 1 12", True),
        (b"12 (python) R 1 12", False),
        (b"12 (a (pt_ b) R) R 1 12", False),
        (b"12 (pt_odd) R name) S 1 12", False),
    ],
)
def test_which_threads_are_waited_for(tmp_path, stat, awake):
    task = tmp_path / "stat"
    task.write_bytes(stat)
    assert rendezvous._runs(task) is awake


def test_a_fork_waits_until_the_thread_sleeps_and_not_for_ever(tmp_path, monkeypatch):
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stat").write_bytes(b"1 (pt_gloo_runloop) R 1")
    pauses = []

    def pause(_):
        pauses.append(1)
        (tmp_path / str(min(len(pauses), 2)) / "stat").write_bytes(b"1 (pt_gloo_runloop) S 1")

    monkeypatch.setattr(rendezvous, "_TASKS", tmp_path)
    monkeypatch.setattr(rendezvous.time, "sleep", pause)
    rendezvous._rest()
    assert len(pauses) == 2
    monkeypatch.setattr(rendezvous.time, "sleep", lambda _: pauses.append(1))
    monkeypatch.setattr(rendezvous, "_LIMIT_S", 0.01)
    (tmp_path / "1" / "stat").write_bytes(b"1 (pt_gloo_runloop) R 1")
    rendezvous._rest()
    assert len(pauses) > 2


def test_a_forked_process_lives(monkeypatch):
    rendezvous.fork_when_quiet()
    rendezvous.fork_when_quiet()
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_group_is_given_up_when_its_threads_are_done(monkeypatch):
    from accelerate.state import PartialState

    order = []
    monkeypatch.setattr(rendezvous, "_rest", lambda: order.append("rest"))
    state = PartialState(cpu=True)
    monkeypatch.setattr("accelerate.process.dist.is_initialized", lambda: True)
    monkeypatch.setattr("accelerate.process.dist.destroy_process_group", lambda group: order.append("destroy"))
    state.destroy_process_group()
    assert order == ["rest"] * rendezvous._ROUNDS + ["destroy"]
