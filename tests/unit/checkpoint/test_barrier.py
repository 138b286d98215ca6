"""How ranks save together, played by threads that meet through a store within one process."""

import contextlib
import logging
import threading
import time
import types
from datetime import timedelta

import pytest
import torch.distributed as dist

from accelerate.checkpoint import barrier
from accelerate.checkpoint.barrier import CollectiveMisuse, SaveBarrier
from accelerate.diagnostics import hang
from accelerate.diagnostics.hang import Watcher


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(barrier, "PATIENCE", timedelta(seconds=0.2))
    monkeypatch.setattr(barrier, "_subset", None)
    for name, seconds in (("ASK_AFTER_S", 0.1), ("ASK_AGAIN_S", 0.05), ("REPORT_AFTER_S", 0.2)):
        monkeypatch.setattr(barrier, name, seconds)
    for name, seconds in (("ASK_WRITERS_AFTER_S", 0.1), ("ASK_WRITERS_AGAIN_S", 0.05)):
        monkeypatch.setattr(barrier, name, seconds)
    for name, seconds in (("STILL_S", 0.1), ("STILL_UNCOUNTED_S", 0.3)):
        monkeypatch.setattr(hang, name, seconds)
    monkeypatch.setattr(hang, "_INTERVAL_S", 0.02)
    monkeypatch.setattr(hang, "_SAMPLE_PAUSE_S", 0.005)


class Ranks:
    """Threads that play the ranks of a run, each watched as a process would be."""

    def __init__(self, world_size):
        self.world_size, self.store = world_size, dist.HashStore()
        self.results, self.raised = {}, {}
        self.over = threading.Event()
        self._threads, self._watchers = {}, {}

    def start(self, rank, function, *arguments, watched=True):
        """Run a function as a rank; what it returns or raises is in `results` and `raised`."""

        def play():
            if watched:
                self._watchers[rank] = Watcher(self.store, rank, self.world_size)
                self._watchers[rank].start()
            try:
                self.results[rank] = function(*arguments)
            except BaseException as error:
                self.raised[rank] = error

        self._threads[rank] = threading.Thread(target=play, daemon=True)
        self._threads[rank].start()

    def meet(self, rank, place="/run/folder", kind="save_state", **options):
        """Return this rank's barrier."""
        return SaveBarrier(kind, place, rank, self.world_size, self.store, **options)

    def end_of(self, rank):
        """Let a rank's program end."""
        self._watchers[rank].end()

    def join(self, *ranks):
        """Wait for ranks, by default for all."""
        for rank in ranks or self._threads:
            self._threads[rank].join(20)
            assert not self._threads[rank].is_alive(), f"rank {rank} hangs"

    def close(self):
        """Let everybody go home."""
        self.over.set()
        for watcher in self._watchers.values():
            watcher.stop()
        self.join()


@pytest.fixture
def ranks(monkeypatch):
    """Return a maker of ranks, which end with the test."""
    # Threads of one process cannot share its one watcher.
    monkeypatch.setattr(hang, "watch", lambda *arguments: None)
    with contextlib.ExitStack() as stack:

        def make(world_size):
            made = Ranks(world_size)
            stack.callback(made.close)
            return made

        yield make


def hold(ranks, who=None, problems=(), presiding=None, acts=None, **options):
    """Let ranks hold one whole barrier; return who acted."""
    acted = []

    def whole(rank):
        gathered = ranks.meet(rank, **options)
        gathered.begin()

        def act():
            acted.append(rank)
            if acts:
                acts(rank)

        presides = None if presiding is None else presiding(rank)
        gathered.end(dict(problems).get(rank), act, presides)

    for rank in range(ranks.world_size) if who is None else who:
        ranks.start(rank, whole, rank)
    ranks.join()
    return acted


def blocked_in_collective(lock):
    """Stand still where torch would wait for other ranks."""

    def wait_for_all(lock):
        lock.acquire()

    types.FunctionType(wait_for_all.__code__, {"__name__": "torch.distributed.made_up"})(lock)


@pytest.fixture
def closed_lock():
    lock = threading.Lock()
    lock.acquire()
    yield lock
    lock.release()


# -- one process ---------------------------------------------------------------------------------------------------


def test_one_process_meets_nobody():
    acted = []
    alone = SaveBarrier("save_state", "/run/folder", 0, 1, None)
    alone.begin()
    assert alone.exchange({"a": 1}) == [{"a": 1}]
    alone.end(None, lambda: acted.append(0))
    assert acted == [0]


def test_one_process_does_not_publish_what_failed():
    acted = []
    with pytest.raises(OSError, match="full"):
        SaveBarrier("save_state", "/run/folder", 0, 1, None).end(OSError("full"), lambda: acted.append(0))
    assert acted == []


def test_ranks_without_a_store_act_each_for_itself():
    # XLA has no process group.
    acted = []
    lonely = SaveBarrier("save_state", "/run/folder", 1, 4, None)
    lonely.begin()
    assert lonely.exchange("note") == ["note"]
    lonely.end(None, lambda: acted.append(1), presiding=False)
    assert acted == [] and lonely.ranks == [1]


def test_there_is_no_store_without_a_group_of_several():
    assert barrier.default_store() is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert barrier.default_store() is None
    finally:
        dist.destroy_process_group()


# -- everybody comes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 5])
def test_one_rank_acts(ranks, world_size):
    group = ranks(world_size)
    assert hold(group) == [0] and group.raised == {}


def test_several_ranks_preside(ranks):
    group = ranks(4)
    assert sorted(hold(group, presiding=lambda rank: rank % 2 == 0)) == [0, 2]


def test_notes_arrive_in_the_order_of_the_ranks(ranks):
    group = ranks(3)

    def talk(rank):
        gathered = group.meet(rank)
        gathered.begin()
        told = [gathered.exchange({"rank": rank, "phase": phase}) for phase in range(3)]
        gathered.end(None)
        return told

    for rank in (2, 1, 0):
        group.start(rank, talk, rank)
    group.join()
    expected = [[{"rank": rank, "phase": phase} for rank in range(3)] for phase in range(3)]
    assert [group.results[rank] for rank in range(3)] == [expected] * 3


def test_the_second_half_may_run_in_another_thread(ranks):
    group = ranks(2)

    def save(rank):
        gathered = group.meet(rank)
        gathered.begin()
        told = []
        thread = threading.Thread(target=lambda: (told.extend(gathered.exchange(rank)), gathered.end(None)))
        thread.start()
        thread.join()
        return told

    for rank in range(2):
        group.start(rank, save, rank)
    group.join()
    assert group.results == {0: [0, 1], 1: [0, 1]}


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_fail_together(ranks, failing):
    group = ranks(2)
    assert hold(group, problems={failing: OSError("disk full")}) == []
    assert isinstance(group.raised[failing], OSError)
    assert isinstance(group.raised[1 - failing], RuntimeError)
    assert f"Rank {failing}: OSError: disk full" in str(group.raised[1 - failing])


def test_a_failing_last_step_fails_everywhere(ranks):
    def fail(rank):
        raise PermissionError("not yours")

    group = ranks(3)
    assert hold(group, acts=fail) == [0]
    assert isinstance(group.raised[0], PermissionError)
    for rank in (1, 2):
        assert type(group.raised[rank]) is RuntimeError and "Rank 0: PermissionError: not yours" in str(
            group.raised[rank]
        )


def test_many_meetings_leave_nothing_behind(ranks):
    group = ranks(2)

    def save(rank, times):
        for _ in range(times):
            gathered = group.meet(rank)
            gathered.begin()
            gathered.exchange(rank)
            gathered.end(None)

    for rank in range(2):
        group.start(rank, save, rank, 40, watched=False)
    group.join()
    assert group.raised == {} and group.store.num_keys() == 1  # the number of the next barrier


def test_a_note_that_json_cannot_say_is_refused_where_it_is_left(ranks):
    group = ranks(2)

    def talk(rank):
        gathered = group.meet(rank)
        gathered.begin()
        with pytest.raises(TypeError, match="JSON"):
            gathered.exchange(object())

    for rank in range(2):
        group.start(rank, talk, rank)
    group.join()
    assert group.raised == {}


# -- somebody does something else ----------------------------------------------------------------------------------


def test_different_paths_are_told_on_all_ranks(ranks):
    group = ranks(3)
    for rank in range(3):
        group.start(rank, group.meet(rank, f"/run/{rank % 2}").begin)
    group.join()
    assert all(isinstance(group.raised[rank], CollectiveMisuse) for rank in range(3))
    (text,) = {str(error) for error in group.raised.values()}
    assert "different paths" in text and "rank 0, 2 called save_state('/run/0') at " in text
    assert "rank 1 called save_state('/run/1') at " in text


def test_machines_of_their_own_may_have_paths_of_their_own(ranks, monkeypatch):
    group = ranks(2)
    gathered = []
    for rank in range(2):
        monkeypatch.setattr(barrier.socket, "gethostname", lambda rank=rank: f"node{rank}")
        gathered.append(group.meet(rank, f"/scratch/{rank}", local_world_size=1))
    for rank in range(2):
        group.start(rank, gathered[rank].begin)
    group.join()
    assert group.raised == {}


def test_saving_does_not_meet_loading(ranks):
    group = ranks(2)
    group.start(0, group.meet(0).begin)
    group.start(1, group.meet(1, kind="load_state").begin)
    group.join()
    for rank in range(2):
        text = str(group.raised[rank])
        assert "rank 0 called save_state(" in text and "rank 1 called load_state(" in text


def save_here(gathered):
    gathered.begin()


def test_a_rank_that_waits_in_a_collective_is_not_waited_for(ranks, closed_lock):
    group = ranks(3)
    group.start(2, blocked_in_collective, closed_lock)
    for rank in range(2):
        group.start(rank, save_here, group.meet(rank))
    group.join(0, 1)
    for rank in range(2):
        assert isinstance(group.raised[rank], CollectiveMisuse)
        text = str(group.raised[rank])
        assert "rank 2 will not call it" in text and barrier.PARTIAL in text
        assert f"rank 0-1 called save_state('/run/folder') at {__file__}:" in text and "in save_here" in text
        assert (
            "rank 2 did not call it: it is at " in text and "in wait_for_all, and waits for other ranks there" in text
        )


def test_a_rank_that_has_ended_is_not_waited_for(ranks):
    group = ranks(2)
    group.start(1, lambda: None)
    group.join()
    group.end_of(1)
    group.start(0, group.meet(0).begin)
    group.join()
    assert isinstance(group.raised[0], CollectiveMisuse) and "rank 1 did not call it: it has ended" in str(
        group.raised[0]
    )


def test_a_rank_that_never_answers_is_given_up(ranks, monkeypatch):
    monkeypatch.setattr(hang, "SILENCE_S", 0.3)
    group = ranks(2)
    group.start(0, group.meet(0).begin)
    group.join()
    assert "it gives no answer" in str(group.raised[0])


def test_a_slow_rank_is_waited_for_and_named_once(ranks, caplog):
    caplog.set_level(logging.WARNING)
    group = ranks(2)

    def evaluate():
        while not group.over.is_set():
            time.sleep(0.001)
        save_here(group.meet(1))

    group.start(1, evaluate)
    group.start(0, save_here, group.meet(0))
    deadline = time.monotonic() + 20
    while "waits for other ranks" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)  # for a second report, or a wrong verdict
    group.over.set()
    group.join()
    assert group.raised == {}
    (record,) = caplog.records
    assert "save_state('/run/folder') waits for other ranks: rank 1 is at " in record.getMessage()
    assert "in evaluate" in record.getMessage()


def test_ranks_meet_again_after_a_misuse(ranks):
    group = ranks(2)
    turn = threading.Event()
    lock = threading.Lock()
    lock.acquire()

    def main():
        with pytest.raises(CollectiveMisuse):
            group.meet(0).begin()
        turn.set()
        lock.release()
        again = group.meet(0, "/run/second")
        again.begin()
        return again.exchange("main")

    def other():
        blocked_in_collective(lock)
        again = group.meet(1, "/run/second")
        again.begin()
        return again.exchange("other")

    group.start(1, other)
    group.start(0, main)
    group.join()
    assert group.raised == {} and group.results == {0: ["main", "other"], 1: ["main", "other"]}


@pytest.mark.parametrize("cleaned", [False, True], ids=["outcome", "cleaned up"])
def test_a_rank_that_comes_while_its_round_closes_joins_the_next(ranks, cleaned):
    group = ranks(2)
    keys = dist.PrefixStore("accelerate/barrier", group.store)
    late = group.meet(0)
    group.start(0, late.begin)
    while not keys.check(["0/0/come"]):
        time.sleep(0.001)
    # Those who were there before have decided without it; the keys are gone once they have all left.
    keys.compare_set("round", "0", "1")
    if not cleaned:
        keys.set("0/0/outcome", '{"ranks": [1], "problem": "another call"}')
    group.start(1, group.meet(1).begin)
    group.join()
    assert group.raised == {} and late.ranks == [0, 1]


# -- a subset ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [0, 1])
def test_a_subset_goes_on_where_that_is_allowed(ranks, alone, caplog, monkeypatch):
    monkeypatch.setenv(barrier.PARTIAL, "1")
    group = ranks(2)
    assert hold(group, who=[alone]) == [alone] and group.raised == {}
    assert f"called by rank {alone}, but not by rank {1 - alone}" in caplog.text
    caplog.clear()
    monkeypatch.setattr(barrier, "PATIENCE", timedelta(seconds=100))
    assert hold(group, who=[alone]) == [alone]  # and does not wait this time
    assert caplog.text == ""


def test_a_subset_of_several_talks_among_itself(ranks, monkeypatch):
    monkeypatch.setenv(barrier.PARTIAL, "1")
    group = ranks(3)

    def talk(rank):
        gathered = group.meet(rank)
        gathered.begin()
        told = gathered.exchange(rank)
        gathered.end(None)
        return gathered.ranks, told

    for _ in range(2):
        for rank in (1, 2):
            group.start(rank, talk, rank)
        group.join()
        assert group.results == {1: ([1, 2], [1, 2]), 2: ([1, 2], [1, 2])}
        monkeypatch.setattr(barrier, "PATIENCE", timedelta(seconds=100))


def test_a_subset_must_agree_too(ranks, monkeypatch):
    monkeypatch.setenv(barrier.PARTIAL, "1")
    group = ranks(3)
    for rank in (0, 2):
        group.start(rank, group.meet(rank, f"/run/{rank}").begin)
    group.join()
    assert all(isinstance(group.raised[rank], CollectiveMisuse) for rank in (0, 2))


# -- somebody is lost on the way -----------------------------------------------------------------------------------


def test_a_rank_that_ends_in_the_middle_is_not_waited_for(ranks):
    group = ranks(3)

    def save(rank):
        gathered = group.meet(rank)
        gathered.begin()
        if rank != 1:
            gathered.end(None)

    for rank in range(3):
        group.start(rank, save, rank)
    group.join(1)
    group.end_of(1)
    group.join()
    for rank in (0, 2):
        assert type(group.raised[rank]) is RuntimeError and "rank 1 has ended" in str(group.raised[rank])


def test_ones_own_problem_comes_before_a_lost_rank(ranks):
    group = ranks(2)

    def save(rank):
        gathered = group.meet(rank)
        gathered.begin()
        if rank == 0:
            gathered.end(OSError("disk full"))

    for rank in range(2):
        group.start(rank, save, rank)
    group.join(1)
    group.end_of(1)
    group.join()
    assert isinstance(group.raised[0], OSError)


class Broken:
    """A store whose process has ended."""

    def __getattr__(self, name):
        def fail(*arguments):
            raise RuntimeError("Connection was likely closed")

        return fail


def test_a_lost_store_is_an_error_that_names_the_call(ranks):
    group = ranks(2)
    gathered = group.meet(0)
    gathered._store = Broken()
    with pytest.raises(CollectiveMisuse, match="has ended") as raised:
        gathered.begin()
    assert __file__ in str(raised.value)
    gathered._phases = [barrier._Round(Broken(), "0/0", 0, [0, 1])]
    with pytest.raises(RuntimeError, match="key-value store has ended"):
        gathered.end(None)


# -- messages ------------------------------------------------------------------------------------------------------


def test_ranks_that_say_the_same_share_a_line():
    texts = {rank: "is here" if rank % 10 else "is there" for rank in range(12)}
    assert barrier._grouped(texts) == ["rank 0, 10 is there", "rank 1-9, 11 is here"]


def test_a_thousand_lines_are_cut():
    lines = barrier._grouped({rank: f"is at line {rank}" for rank in range(1000)})
    assert len(lines) == 17 and lines[-1] == "and 984 more such lines"
