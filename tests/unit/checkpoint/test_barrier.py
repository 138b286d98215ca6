"""How ranks save together, played by threads that meet through a store within one process."""

import json
import threading
import time
import types

import pytest
import torch.distributed as dist

from accelerate.checkpoint import barrier
from accelerate.checkpoint.barrier import CollectiveMisuse, Group, SaveBarrier
from accelerate.diagnostics import hang, status
from accelerate.diagnostics.hang import Watcher
from cases import cases

LIMIT_S = 30


class Ranks:
    """Threads that play the three ranks of a run; where they ask for each other, each is watched as a process would be."""

    def __init__(self):
        self.size, self.store, self.watched = 3, dist.HashStore(), False
        self.results, self.raised, self.threads, self.watchers = {}, {}, {}, {}

    def barrier(self, rank, location="/run/folder", kind="save_state", local_rank=None):
        """Return this rank's barrier; with a local rank, machines have checkpoints of their own."""
        own = local_rank is not None
        return SaveBarrier(kind, location, Group(rank, self.size, local_rank or 0, own, not own), self.store)

    def start(self, function, *ranks):
        """Let ranks, by default all, run a function of their number; what it returns or raises is kept."""
        for rank in ranks or range(self.size):
            self.threads[rank] = threading.Thread(target=self._run, args=(function, rank), daemon=True)
            self.threads[rank].start()

    def _run(self, function, rank):
        if self.watched:
            if rank in self.watchers:
                self.watchers[rank].stop()
            self.watchers[rank] = Watcher(self.store, rank, self.size)
            self.watchers[rank].start()
        try:
            self.results[rank] = function(rank)
        except BaseException as error:
            self.raised[rank] = error

    def join(self, *ranks):
        for rank in ranks or self.threads:
            self.threads[rank].join(LIMIT_S)
            assert not self.threads[rank].is_alive(), f"rank {rank} hangs"

    def play(self, function, *ranks):
        self.start(function, *ranks)
        self.join()


@pytest.fixture
def ranks(monkeypatch):
    for name in ("ASK_AFTER_S", "ASK_WRITERS_AFTER_S"):
        monkeypatch.setattr(barrier, name, float("inf"))
    # Threads of one process cannot share its one watcher.
    monkeypatch.setattr(hang, "watch", lambda *arguments: None)
    made = Ranks()
    yield made
    for watcher in made.watchers.values():
        watcher.stop()
    made.join()


@pytest.fixture
def asking(ranks, monkeypatch):
    for name in ("ASK_AFTER_S", "ASK_AGAIN_S", "ASK_WRITERS_AFTER_S", "ASK_WRITERS_AGAIN_S"):
        monkeypatch.setattr(barrier, name, 0.05)
    monkeypatch.setattr(barrier, "REPORT_AFTER_S", 0)
    monkeypatch.setattr(status, "STILL_UNCOUNTED_S", 0.1)
    ranks.watched = True
    return ranks


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


def save_here(gathered):
    gathered.begin()


def alone(store, rank=0):
    return SaveBarrier("save_state", "/run/folder", Group(rank, 2, 0, False, True), store)


def test_saves_of_all_ranks_leave_nothing_that_piles_up(ranks):
    keys = []

    def save(rank):
        gathered = ranks.barrier(rank)
        gathered.begin()
        said = [gathered.share({"rank": rank}), gathered.share([rank] * rank, root=1), gathered.share(rank, root=rank)]
        said += [gathered.share(), gathered.any_of(False), gathered.any_of(rank == 2), gathered.smallest(7 - rank)]
        gathered.leave()
        return said, gathered.name

    names = set()
    for _ in range(4):
        ranks.play(save)
        assert ranks.raised == {} and len({ranks.results[rank][1] for rank in range(3)}) == 1
        for rank in range(3):
            assert ranks.results[rank][0] == [{"rank": 0}, [1], rank, None, False, True, 5]
        names.add(ranks.results[0][1])
        keys.append(ranks.store.num_keys())
    assert len(names) == 4 and len(set(keys[1:])) == 1, keys


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_fail_together(ranks, failing):
    def save(rank):
        gathered = ranks.barrier(rank)
        gathered.begin()
        for refused, error in ((object(), TypeError), ("y" * (64 << 10), ValueError)):
            with pytest.raises(error, match="JSON|65536 bytes"):  # refused where it is left
                gathered.share(refused, root=rank)
        gathered.share("a note", problem=OSError("disk full") if rank == failing else None)

    ranks.play(save)
    assert [type(ranks.raised[rank]) is OSError for rank in range(3)] == [rank == failing for rank in range(3)]
    text = f"save_state('/run/folder') failed on other ranks. Rank {failing}: OSError: disk full"
    assert {str(ranks.raised[rank]) for rank in range(3) if rank != failing} == {text}


def test_of_many_problems_some_are_told(ranks):
    ranks.size = 45

    def save(rank):
        gathered = ranks.barrier(rank)
        gathered.begin()
        gathered.any_of(True, OSError("\u00e4\n\x00" * 5000) if rank else None)

    ranks.play(save)
    text = str(ranks.raised[0])
    assert text.count("OSError: \u00e4") == 30 and text.endswith(" and 14 more") and len(text.encode()) < 64 << 10
    assert all(type(ranks.raised[rank]) is OSError for rank in range(1, 45))


def test_machines_of_their_own_have_paths_and_leaders_of_their_own(ranks, monkeypatch):
    places = [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("c", 5)]  # dealt out in turn; the last one is alone
    ranks.size, machine = 5, threading.local()
    monkeypatch.setattr("socket.gethostname", lambda: machine.name)

    def save(rank):
        machine.name, local = places[rank]
        gathered = ranks.barrier(rank, f"/scratch/{machine.name}", local_rank=local)
        gathered.begin()
        return gathered.leader()

    ranks.play(save)
    assert ranks.raised == {} and ranks.results == {0: 0, 1: 1, 2: 0, 3: 1, 4: 4}


@cases(
    "kinds, places, text",
    ("save", "010", "save_state was called with different paths:\n  rank 0, 2 called save_state('/run/0') at "),
    ("load", "01111111101", "rank 1-8, 10 called load_state('/run/1') at "),
    (["save", "load"], "00", "Some ranks called load_state while others called save_state:\n  rank 0 called save_"),
    ("save", range(20), "\nCall save_state on every rank, with the same path."),
)
def test_different_calls_are_an_error_on_all_ranks(ranks, kinds, places, text):
    ranks.size = len(places)
    kinds = kinds if isinstance(kinds, list) else [kinds] * ranks.size
    ranks.play(lambda rank: ranks.barrier(rank, f"/run/{places[rank]}", f"{kinds[rank]}_state").begin())
    assert [type(ranks.raised.get(rank)) for rank in range(ranks.size)] == [CollectiveMisuse] * ranks.size
    assert len({str(error) for error in ranks.raised.values()}) == 1 and text in str(ranks.raised[0])


def test_ranks_do_not_wait_for_one_in_a_collective_and_meet_it_afterwards(asking, closed_lock):
    def save(rank):
        text = None
        if rank == 2:
            stand_in_collective(closed_lock)
        else:
            with pytest.raises(CollectiveMisuse) as raised:
                save_here(asking.barrier(rank))
            text = str(raised.value)
        if rank == 0:
            closed_lock.release()
        again = asking.barrier(rank, "/run/second")
        again.begin()
        return [again.share(text, root) for root in range(3)]

    asking.play(save)
    assert asking.raised == {} and asking.results[0] == asking.results[1] == asking.results[2]
    first, second, _ = asking.results[0]
    assert first == second and "rank 2 will not call it" in first
    assert f"rank 0-1 called save_state('/run/folder') at {__file__}:" in first and "in save_here" in first
    assert "rank 2 did not call it: it is at " in first
    assert "made_up.wait_for_all, and waits for other ranks there" in first


@pytest.mark.parametrize("left", [False, True])
def test_a_rank_that_comes_while_its_barrier_closes_joins_the_next(asking, monkeypatch, left):
    real, closed = json.dumps, threading.Event()

    def refused(rank):
        with pytest.raises(CollectiveMisuse, match="different paths"):
            asking.barrier(rank, f"/run/{rank}").begin()

    def dumps(note):
        if threading.current_thread() is asking.threads[0] and not closed.is_set():  # before it leaves its first note
            with monkeypatch.context() as patch:
                if not left:  # the keys of the others are still there
                    patch.setattr(SaveBarrier, "leave", lambda self: None)
                asking.start(refused, 1, 2)
                asking.join(1, 2)
            closed.set()
        return real(note)

    def meet(rank):
        gathered = asking.barrier(rank)
        gathered.begin()
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
        gathered = asking.barrier(rank)
        gathered.begin()
        if rank == 1 and waits:
            stand_in_collective(closed_lock)
        elif rank != 1:
            gathered.share(problem=OSError("disk full") if fails and rank == 0 else None)

    asking.start(save)
    if not waits:
        asking.join(1)
        asking.watchers[1].end()
    asking.join(0, 2)
    assert type(asking.raised[0]) is (OSError if fails else RuntimeError) and type(asking.raised[2]) is RuntimeError
    assert f"The others wait in vain: rank 1 {'is at' if waits else 'has ended'}" in str(asking.raised[2])


def test_the_second_rank_asks_where_the_first_has_been_killed(asking, monkeypatch):
    """It waited for the outcome for ever: the first rank alone asked where the others are."""
    real, killed = time.sleep, threading.Event()

    def sleep(seconds):
        if threading.current_thread() is asking.threads.get(0):  # which has come and asks nobody yet
            killed.set()
            raise SystemExit
        real(seconds)

    monkeypatch.setattr("time.sleep", sleep)
    asking.play(lambda rank: None, 2)
    asking.watchers[2].end()
    asking.start(lambda rank: asking.barrier(rank).begin(), 0)
    assert killed.wait(LIMIT_S)
    asking.watchers[0].end()
    asking.start(lambda rank: asking.barrier(rank).begin(), 1)
    asking.join()
    assert isinstance(asking.raised[1], CollectiveMisuse)
    assert "rank 2 did not call it: it has ended" in str(asking.raised[1])


def test_a_lost_store_is_an_error_that_names_the_call(ranks):
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [dist.TCPStore("127.0.0.1", held.port, is_master=False) for _ in range(2)]
    gathered = [alone(stores[rank], rank) for rank in range(2)]
    ranks.play(lambda rank: save_here(gathered[rank]), 0, 1)
    del held
    with pytest.raises(RuntimeError, match="key-value store has ended"):
        gathered[0].share()
    with pytest.raises(CollectiveMisuse, match="key-value store has ended") as raised:
        save_here(alone(stores[0]))
    assert f"{__file__}:" in str(raised.value) and "in save_here" in str(raised.value)
