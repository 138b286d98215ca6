"""Launchers that meet at a store, in threads of one process."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from accelerate.launch import meeting as meeting_module
from accelerate.launch.errors import LaunchError, RunError
from accelerate.launch.meeting import Meeting, is_preempted
from accelerate.utils.other import get_free_port


def at(port: int, machine: int | None, machines: int = 2, processes: int = 1, **rest: Any) -> Meeting:
    settings = {"join_timeout": 20.0, "beat_timeout": 20.0, "tell": lambda line: None, **rest}
    return Meeting("127.0.0.1", port, machines, machine, processes, **settings)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Call functions at the same time; return what they returned or raised."""
    results: list[Any] = [None] * len(calls)

    def call(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(meeting_module, "_BEAT_S", 0.05)
    monkeypatch.setattr(meeting_module, "_STALE_S", 0.5)


@pytest.fixture
def port():
    return get_free_port()


@pytest.fixture
def meet(port):
    """Let machines join a round; they leave at the end of the test."""
    met: list[Meeting] = []

    def meet(*meetings: Meeting) -> list[Any]:
        met.extend(meeting for meeting in meetings if meeting not in met)
        return together(*(meeting.join for meeting in meetings))

    yield meet
    for meeting in reversed(met):
        meeting.leave()


def until(found: Callable[[], Any]) -> Any:
    waiting = threading.Event()
    for _ in range(400):
        if result := found():
            return result
        waiting.wait(0.05)
    raise AssertionError("waited in vain")


def test_all_know_all(port, meet):
    three = [at(port, machine, machines=3) for machine in (2, 0, 1)]
    stores = meet(*three)
    assert not any(isinstance(store, Exception) for store in stores), stores
    assert [meeting.machine for meeting in three] == [2, 0, 1] and {meeting.round for meeting in three} == {0}
    assert {tuple(sorted(meeting.members)) for meeting in three} == {(0, 1, 2)}
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


def test_numbers_are_given(port, meet):
    host = at(port, 0, machines=3)
    others = [at(port, None, machines=3) for _ in range(2)]
    for other in others:  # on one host, all have the address; on several, only machine 0
        other.is_host, other.machine, other._numbered = False, None, False
    assert not any(isinstance(store, Exception) for store in meet(host, *others))
    assert sorted(other.machine for other in others) == [1, 2]


def test_a_restart_is_followed(port, meet):
    first, second = at(port, 0), at(port, 1)
    meet(first, second)
    stores = together(first.join, lambda: until(second.reopened) and second.join())
    assert not any(isinstance(store, Exception) for store in stores), stores
    assert (first.round, second.round) == (1, 1)
    assert not first.reopened()


def test_both_may_ask_for_the_restart(port, meet):
    first, second = at(port, 0), at(port, 1)
    for round_ in range(3):
        meet(first, second)
        assert (first.round, second.round) == (round_, round_)


def test_a_late_launcher_does_not_disturb(port, meet):
    first, second = at(port, 0), at(port, 1)
    meet(first, second)
    late = at(port, 1, join_timeout=1.0)
    (error,) = meet(late)
    assert isinstance(error, RunError) and "goes on without this machine" in str(error)
    assert not first.reopened() and first.lost() is None


def test_a_new_launcher_takes_the_place_of_a_lost_one(port, meet):
    first, second = at(port, 0, beat_timeout=1.0), at(port, 1)
    meet(first, second)
    second._stop_watching()  # without a word, as if it was killed
    lost = until(first.lost)
    assert "machine 1 (" in str(lost) and "has not answered" in str(lost)
    first.forget()
    new = at(port, 1)
    assert not any(isinstance(store, Exception) for store in meet(first, new))
    assert (first.round, new.round) == (1, 1) and first.members[1].identity != second._identity


def test_who_is_done_need_not_answer(port, meet):
    first, second = at(port, 0, beat_timeout=1.0), at(port, 1)
    meet(first, second)
    second.say_done()
    second.leave()
    until(lambda: first._watch.done)
    first.say_done()
    assert until(first.all_done) and first.lost() is None


def test_a_failure_is_told_once(port, meet):
    first, second = at(port, 0), at(port, 1)
    meet(first, second)
    second.say_failed("rank 1 ended with exit status 9")
    assert "machine 1 (" in until(first.failed_elsewhere) and "status 9" in first.failed_elsewhere()
    first.say_failed("rank 0 ended with exit status 1")
    until(lambda: not first._watch._posts)
    assert "status 9" in first.failed_elsewhere()


def test_machines_must_agree(port, meet):
    for error in meet(at(port, 0, processes=2), at(port, 1, processes=4)):
        assert isinstance(error, LaunchError) and "2 on machine" in str(error) and "4 on machine" in str(error)


def test_one_number_for_each(port, meet):
    host = at(port, 0, machines=3, join_timeout=2.0)
    results = meet(host, at(port, 1, machines=3, join_timeout=2.0), at(port, 1, machines=3, join_timeout=2.0))
    assert sum(isinstance(error, LaunchError) and "number of its own" in str(error) for error in results) == 1, results


def test_who_does_not_come_is_named(port, meet):
    told: list[str] = []
    (error,) = meet(at(port, 0, machines=3, join_timeout=0.5, tell=told.append))
    assert isinstance(error, RunError) and "machine 1, 2 of 3" in str(error) and f"port {port}" in str(error)


def test_nobody_listens(port, meet):
    (error,) = meet(at(port, 1, join_timeout=0.5))
    assert isinstance(error, RunError) and "127.0.0.1" in str(error) and str(port) in str(error)


def test_the_port_is_taken(port, meet):
    meet(at(port, 0, machines=1))
    (error,) = meet(at(port, 0, machines=1))
    assert isinstance(error, RunError) and "cannot listen" in str(error) and "--main_process_port" in str(error)


def test_who_leaves_by_a_signal_says_so_and_is_not_awaited(port, meet):
    first, second = at(port, 0), at(port, 1)
    meet(first, second)
    second.say_ended("was stopped by SIGINT")
    second.leave()
    assert "machine 1 (" in str(until(first.lost)) and "was stopped by SIGINT. The processes" in str(first.lost())


def test_a_launcher_that_fails_in_its_own_way_says_so(port, meet):
    first, second = at(port, 0), at(port, 1)
    meet(first, second)
    second.leave()
    assert "has left the run" in str(until(first.lost))


def test_who_has_failed_and_left_is_not_missed(port, meet, quick):
    first, second = at(port, 0, beat_timeout=0.5), at(port, 1)
    meet(first, second)
    second.say_failed("rank 1 ended with exit status 75")
    second.leave()
    until(first.failed_elsewhere)
    answered = first._watch._answered
    until(lambda: first._watch._answered > answered + 1.0)
    assert first.lost() is None


def test_machine_0_stays_while_others_save(port, meet, quick):
    first, second = at(port, 0), at(port, 1)
    meet(first, second)
    first.say_failed("rank 0 ended with exit status 75")
    leaving = threading.Thread(target=first.leave, args=(60.0,))
    leaving.start()
    assert is_preempted(until(second.failed_elsewhere))
    answered = second._watch._answered
    until(lambda: second._watch._answered > answered + 10 * meeting_module._BEAT_S)
    assert leaving.is_alive() and second.lost() is None
    second.say_failed("rank 1 ended with exit status 75")
    second.leave()
    leaving.join(20)
    assert not leaving.is_alive()


def test_machine_0_does_not_stay_for_those_that_have_heard_of_a_failure(port, meet, quick):
    first, second = at(port, 0), at(port, 1)
    meet(first, second)
    first.say_failed("rank 0 ended with exit status 7")
    leaving = threading.Thread(target=first.leave, args=(60.0,))
    leaving.start()
    leaving.join(20)
    assert not leaving.is_alive() and not is_preempted("rank 0 ended with exit status 7")


@pytest.fixture
def waiting():
    """Let machines join a round in the background; returns a function that waits for what they returned or raised."""
    threads: list[threading.Thread] = []

    def begin(*meetings: Meeting) -> Callable[[], list[Any]]:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.extend(together(*(meeting.join for meeting in meetings))))
        threads.append(thread)
        thread.start()
        return lambda: thread.join(60) or results

    yield begin
    for thread in threads:
        thread.join(60)


def test_who_gives_up_waiting_frees_its_place(port, meet, waiting):
    host, third = at(port, 0, machines=4), at(port, 2, machines=4)
    stores = waiting(host, third)
    (error,) = together(at(port, 1, machines=4, join_timeout=0.5).join)
    assert isinstance(error, RunError) and "did not come" in str(error)
    again = at(port, 1, machines=4)
    results = meet(again, at(port, 3, machines=4)) + stores()
    assert not any(isinstance(store, Exception) for store in results), results
    assert host.members[1].identity == again._identity


def test_who_was_killed_while_it_waited_loses_its_place(port, meet, waiting, quick, monkeypatch):
    host, killed = at(port, 0, machines=3), at(port, 1, machines=3, join_timeout=0.5)
    stores = waiting(host)
    monkeypatch.setattr(killed, "_cross_out", lambda: None)
    together(killed.join)
    again = at(port, 1, machines=3)
    more = waiting(again)
    until(lambda: again._signature)  # it has struck out the other
    results = meet(at(port, 2, machines=3)) + more() + stores()
    assert not any(isinstance(store, Exception) for store in results), results
    assert host.members[1].identity == again._identity


def test_machines_must_agree_on_restarts(port, meet):
    for error in meet(at(port, 0, restarts=2), at(port, 1)):
        assert isinstance(error, LaunchError) and "--max_restarts" in str(error)


def test_the_port_is_free_afterwards(port, meet):
    for _ in range(2):
        first, second = at(port, 0), at(port, 1)
        stores = together(first.join, second.join)
        assert not any(isinstance(store, Exception) for store in stores), stores
        second.leave(), first.leave()
        del first, second, stores
