"""Ranks of saves and loads that look for each other."""

import json
import threading
import time
import types

import pytest
import torch.distributed as dist

from accelerate.checkpoint import ranks as checkpoint_ranks
from accelerate.checkpoint.ranks import CollectiveMisuse
from accelerate.extensions.hang import status
from accelerate.extensions.hang.hang import HangDiagnosis, Watcher
from unit.checkpoint.test_ranks import LIMIT_S, Threads


class WatchedRanks(Threads):
    """Threads that play ranks, each with a watcher as a process has it."""

    def __init__(self):
        super().__init__()
        self.watchers = {}

    def _run(self, function, rank):
        if rank in self.watchers:
            self.watchers[rank].stop()
        self.watchers[rank] = Watcher(self.store, rank, self.size)
        self.watchers[rank].start()
        super()._run(function, rank)


def save_here(threads, rank):
    threads.seen_by(rank).agree("save_state", "/run/folder")


@pytest.fixture
def asking(monkeypatch):
    for name in ("ASK_AFTER_S", "ASK_AGAIN_S", "ASK_WRITERS_AFTER_S", "ASK_WRITERS_AGAIN_S"):
        monkeypatch.setattr(checkpoint_ranks, name, 0.05)
    monkeypatch.setattr(checkpoint_ranks, "REPORT_AFTER_S", 0)
    monkeypatch.setattr(status, "STILL_UNCOUNTED_S", 0.1)
    monkeypatch.setattr(
        HangDiagnosis, "joined", lambda *arguments: None
    )  # threads cannot share the watcher of a process
    ranks = WatchedRanks()
    yield ranks
    for watcher in ranks.watchers.values():
        watcher.stop()
    ranks.join()


def stand_in_collective(lock):
    def wait_for_all(lock):
        lock.acquire()

    code = wait_for_all.__code__.replace(co_filename=dist.__file__)
    types.FunctionType(code, {"__name__": "torch.distributed.made_up"})(lock)


@pytest.fixture
def closed_lock():
    lock = threading.Lock()
    lock.acquire()
    yield lock
    if lock.locked():
        lock.release()


def test_ranks_do_not_wait_for_one_in_a_collective_and_meet_it_afterwards(asking, closed_lock):
    def save(rank):
        text = None
        if rank == 2:
            stand_in_collective(closed_lock)
        else:
            with pytest.raises(CollectiveMisuse) as raised:
                save_here(asking, rank)
            text = str(raised.value)
        if rank == 0:
            closed_lock.release()
        again = asking.agreed(rank, "/run/second")
        return [again.share(text, root) for root in range(3)]

    asking.play(save)
    assert asking.raised == {} and asking.results[0] == asking.results[1] == asking.results[2]
    first, second, _ = asking.results[0]
    assert first == second and "rank 2 will not call it" in first
    assert f"rank 0-1 called save_state('/run/folder') at {__file__}:" in first and "in save_here" in first
    assert "rank 2 did not call it: it is at " in first
    assert "made_up.wait_for_all, and waits for other ranks there" in first


def test_a_rank_that_comes_while_a_meeting_closes_joins_the_next(asking, monkeypatch):
    real, closed = json.dumps, threading.Event()

    def refused(rank):
        with pytest.raises(CollectiveMisuse, match="different paths"):
            asking.agreed(rank, f"/run/{rank}")

    def dumps(note):
        if threading.current_thread() is asking.threads[0] and not closed.is_set():  # before it leaves its first note
            asking.start(refused, 1, 2)
            asking.join(1, 2)
            closed.set()
        return real(note)

    def meet(rank):
        gathered = asking.agreed(rank)
        return [gathered.share(rank, root) for root in range(3)]

    monkeypatch.setattr("json.dumps", dumps)
    asking.start(meet, 0)
    assert closed.wait(LIMIT_S)
    asking.start(meet, 1, 2)
    asking.join()
    assert asking.raised == {} and asking.results == {rank: [0, 1, 2] for rank in range(3)}


@pytest.mark.parametrize("fails, waits", [(False, False), (True, False), (True, True)])
def test_a_rank_that_ends_or_waits_for_one_that_failed_is_not_waited_for(asking, closed_lock, fails, waits):
    def save(rank):
        gathered = asking.agreed(rank)
        if rank == 1 and waits:
            stand_in_collective(closed_lock)
        elif rank != 1:
            gathered.first_error(OSError("disk full") if fails and rank == 0 else None)

    asking.start(save)
    if not waits:
        asking.join(1)
        asking.watchers[1].end()
    asking.join(0, 2)
    assert type(asking.raised[0]) is (OSError if fails else RuntimeError) and type(asking.raised[2]) is RuntimeError
    assert f"The others cannot continue: rank 1 {'is at' if waits else 'has ended'}" in str(asking.raised[2])


def test_the_second_rank_asks_where_the_first_has_been_killed(asking, monkeypatch):
    """It waited for the outcome for ever: the first rank alone asked where the others are."""
    real, killed = time.sleep, threading.Event()

    def sleep(seconds):
        if threading.current_thread() is asking.threads.get(0):  # which has come and has not asked yet
            killed.set()
            raise SystemExit
        real(seconds)

    monkeypatch.setattr("time.sleep", sleep)
    asking.play(lambda rank: None, 2)
    asking.watchers[2].end()
    asking.start(lambda rank: asking.agreed(rank), 0)
    assert killed.wait(LIMIT_S)
    asking.watchers[0].end()
    asking.start(lambda rank: asking.agreed(rank), 1)
    asking.join()
    assert isinstance(asking.raised[1], CollectiveMisuse)
    assert "rank 2 did not call it: it has ended" in str(asking.raised[1])
