"""Which evidence lets a missing rank pass for stuck."""

import pytest
import torch.distributed as dist

from accelerate.diagnostics import hang
from accelerate.diagnostics.hang import Diagnosis, RankStatus


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(hang.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def diagnosis(clock):
    return Diagnosis(dist.HashStore(), [0, 1, 2], 3, leads=True, again=1)


def hear(diagnosis, clock, seconds, *answers):
    """Let ranks give the same answers for a while."""
    for _ in range(int(seconds) + 1):
        for answer in answers:
            diagnosis.observations[answer.rank].add(clock[0], answer)
        clock[0] += 1


def at(rank, waits=False, position="here", backend="gloo", inside="", **counters):
    """Return an answer."""
    return RankStatus(
        rank,
        answered=True,
        site="x.py:1 in f",
        inside=inside,
        waits=waits,
        position=position,
        counters={f"{backend}:{name}": count for name, count in counters.items()},
    )


def test_who_waits_in_a_collective_that_we_have_not_joined_is_stuck(diagnosis, clock):
    hear(diagnosis, clock, 1, at(0, world=5), at(1, world=6, waits=True), at(2, world=5))
    assert diagnosis.stuck([1, 2]) == [1]


def test_one_answer_is_not_enough(diagnosis, clock):
    hear(diagnosis, clock, 0, at(0, world=5), at(1, world=6, waits=True), at(2, world=5))
    clock[0] -= 1
    assert diagnosis.stuck([1, 2]) == []


def test_who_moves_is_not_stuck(diagnosis, clock):
    hear(diagnosis, clock, 1, at(0, world=5), at(1, world=6, waits=True), at(2, world=5))
    diagnosis.observations[1].add(clock[0], at(1, world=6, waits=True, position="elsewhere"))
    assert diagnosis.stuck([1, 2]) == []


def test_who_waits_for_a_third_rank_is_waited_for(diagnosis, clock):
    # Rank 1 has started nothing that rank 0 has not: it waits for rank 2, which computes.
    hear(diagnosis, clock, 100, at(0, world=5), at(1, world=5, pair=3, waits=True), at(2, world=5))
    assert diagnosis.stuck([1, 2]) == []


def test_who_computes_is_waited_for_even_if_ahead(diagnosis, clock):
    # gloo counts messages between two ranks as well.
    hear(diagnosis, clock, 100, at(0, world=5), at(1, world=9), at(2, world=5))
    assert diagnosis.stuck([1, 2]) == []


def test_who_waits_for_a_message_is_waited_for(diagnosis, clock):
    inside = "torch.distributed.c10d_logger.wrapper > torch.distributed.distributed_c10d.recv"
    hear(diagnosis, clock, 100, at(0, world=5), at(1, world=6, waits=True, inside=inside), at(2, world=5))
    assert diagnosis.stuck([1, 2]) == []


def test_on_a_gpu_it_does_not_matter_where_one_stands_still(diagnosis, clock):
    hear(diagnosis, clock, 1, *(at(rank, world=5 + rank % 2, backend="nccl") for rank in range(3)))
    assert diagnosis.stuck([1, 2]) == [1]


def test_without_counters_waiting_must_last(diagnosis, clock):
    answers = [at(0), at(1, waits=True), at(2)]
    hear(diagnosis, clock, 3, *answers)
    assert diagnosis.stuck([1, 2]) == []
    hear(diagnosis, clock, 3, *answers)
    assert diagnosis.stuck([1, 2]) == [1]


def test_where_all_wait_nobody_comes(diagnosis, clock):
    answers = [at(0, world=5), at(1, world=5, waits=True), at(2, world=5, waits=True)]
    hear(diagnosis, clock, 10, *answers)
    assert diagnosis.stuck([1, 2]) == []
    hear(diagnosis, clock, 6, *answers)
    assert diagnosis.stuck([1, 2]) == [1, 2]


def test_silence_counts_unless_the_process_is_seen(diagnosis, clock):
    hear(diagnosis, clock, 30, at(0), RankStatus(1), RankStatus(2, alive=True))
    assert diagnosis.gone([1, 2]) == []
    hear(diagnosis, clock, 100, at(0), RankStatus(1), RankStatus(2, alive=True))
    assert diagnosis.gone([1, 2]) == [1]


def test_the_end_of_a_rank_needs_no_time(diagnosis, clock):
    hear(diagnosis, clock, 0, at(0), RankStatus(1, ended=True), RankStatus(2, alive=False))
    assert diagnosis.gone([1, 2]) == [1, 2]
