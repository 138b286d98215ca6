"""Which evidence lets a missing rank pass for stuck."""

import pytest
import torch.distributed as dist

from accelerate.checkpoint import absence
from accelerate.checkpoint.absence import Search
from accelerate.runtime.whereabouts import Whereabouts


class Gathering:
    """Three ranks of which some are missing."""

    def __init__(self):
        self.store, self.ranks = dist.HashStore(), [0, 1, 2]

    def key(self, name):
        """Return a key."""
        return f"gathering/{name}"


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(absence.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def search(clock):
    gathering = Gathering()
    return Search(gathering.store, gathering, 3, leads=True, after=2, again=1)


def hear(search, clock, seconds, *answers):
    """Let ranks give the same answers for a while."""
    for _ in range(int(seconds) + 1):
        for answer in answers:
            search.traces[answer.rank].add(clock[0], answer)
        clock[0] += 1


def at(rank, waits=False, position="here", backend="gloo", inside="", **counters):
    """Return an answer."""
    return Whereabouts(
        rank,
        answered=True,
        site="x.py:1 in f",
        inside=inside,
        waits=waits,
        position=position,
        counters={f"{backend}:{name}": count for name, count in counters.items()},
    )


def test_who_waits_in_a_collective_that_we_have_not_joined_is_stuck(search, clock):
    hear(search, clock, 1, at(0, world=5), at(1, world=6, waits=True), at(2, world=5))
    assert search.stuck([1, 2]) == [1]


def test_one_answer_is_not_enough(search, clock):
    hear(search, clock, 0, at(0, world=5), at(1, world=6, waits=True), at(2, world=5))
    clock[0] -= 1
    assert search.stuck([1, 2]) == []


def test_who_moves_is_not_stuck(search, clock):
    hear(search, clock, 1, at(0, world=5), at(1, world=6, waits=True), at(2, world=5))
    search.traces[1].add(clock[0], at(1, world=6, waits=True, position="elsewhere"))
    assert search.stuck([1, 2]) == []


def test_who_waits_for_a_third_rank_is_waited_for(search, clock):
    # Rank 1 has started nothing that rank 0 has not: it waits for rank 2, which computes.
    hear(search, clock, 100, at(0, world=5), at(1, world=5, pair=3, waits=True), at(2, world=5))
    assert search.stuck([1, 2]) == []


def test_who_computes_is_waited_for_even_if_ahead(search, clock):
    # gloo counts messages between two ranks as well.
    hear(search, clock, 100, at(0, world=5), at(1, world=9), at(2, world=5))
    assert search.stuck([1, 2]) == []


def test_who_waits_for_a_message_is_waited_for(search, clock):
    inside = "torch.distributed.c10d_logger.wrapper > torch.distributed.distributed_c10d.recv"
    hear(search, clock, 100, at(0, world=5), at(1, world=6, waits=True, inside=inside), at(2, world=5))
    assert search.stuck([1, 2]) == []


def test_on_a_gpu_it_does_not_matter_where_one_stands_still(search, clock):
    hear(search, clock, 1, *(at(rank, world=5 + rank % 2, backend="nccl") for rank in range(3)))
    assert search.stuck([1, 2]) == [1]


def test_without_counters_waiting_must_last(search, clock):
    answers = [at(0), at(1, waits=True), at(2)]
    hear(search, clock, 3, *answers)
    assert search.stuck([1, 2]) == []
    hear(search, clock, 3, *answers)
    assert search.stuck([1, 2]) == [1]


def test_where_all_wait_nobody_comes(search, clock):
    answers = [at(0, world=5), at(1, world=5, waits=True), at(2, world=5, waits=True)]
    hear(search, clock, 10, *answers)
    assert search.stuck([1, 2]) == []
    hear(search, clock, 6, *answers)
    assert search.stuck([1, 2]) == [1, 2]


def test_silence_counts_unless_the_process_is_seen(search, clock):
    hear(search, clock, 30, at(0), Whereabouts(1), Whereabouts(2, alive=True))
    assert search.gone([1, 2]) == []
    hear(search, clock, 100, at(0), Whereabouts(1), Whereabouts(2, alive=True))
    assert search.gone([1, 2]) == [1]


def test_the_end_of_a_rank_needs_no_time(search, clock):
    hear(search, clock, 0, at(0), Whereabouts(1, ended=True), Whereabouts(2, alive=False))
    assert search.gone([1, 2]) == [1, 2]


def test_others_take_over_from_one_that_asks_no_longer(clock):
    gathering = Gathering()
    gathering.store.add(gathering.key("asks"), 7)
    other = Search(gathering.store, gathering, 3, leads=False, after=2, again=1)
    assert not other.news() and not gathering.store.check(["accelerate/whereabouts/asked"])
    clock[0] += 2 + absence.TAKE_OVER_S  # the first asks: seven times so far
    assert not other.news() and gathering.store.add(gathering.key("asks"), 0) == 7
    clock[0] += absence.TAKE_OVER_S  # still seven times
    other.news()
    assert gathering.store.add(gathering.key("asks"), 0) == 8
