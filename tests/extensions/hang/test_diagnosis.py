"""Which evidence lets a missing rank pass for stuck."""

import pytest
import torch.distributed as dist

from accelerate.extensions.hang import hang
from accelerate.extensions.hang.status import Diagnosis, RankStatus
from cases import cases


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(hang.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def diagnosis(clock):
    return Diagnosis(dist.HashStore(), [0, 1, 2], 3, leads=True, again=1)


def at(rank, still=100, waits=False, backend="gloo", inside="torch.distributed.distributed_c10d.barrier", **counters):
    """Return an answer of a rank that has stood still for some seconds."""
    return RankStatus(
        rank,
        answered=True,
        site="x.py:1 in f",
        inside=inside if waits else "",
        operation="barrier" if waits else "",
        still_s=still,
        counters={f"{backend}:{name}": count for name, count in counters.items()},
    )


RECEIVES = "torch.distributed.c10d_logger.wrapper > torch.distributed.distributed_c10d.recv"
BEHIND = [at(0, world=5), at(2, world=5)]


@cases(
    "answers, stuck",
    ([*BEHIND, at(1, 1, world=6, waits=True)], [1]),  # in a collective that we have not joined
    ([*BEHIND, at(1, 0.5, world=6, waits=True)], []),  # a moment is not enough
    # Rank 1 has started nothing that rank 0 has not: it waits for rank 2, which computes.
    ([*BEHIND, at(1, world=5, pair=3, waits=True)], []),
    ([*BEHIND, at(1, world=9)], []),  # it computes, and gloo counts messages between two ranks as well
    ([*BEHIND, at(1, world=6, waits=True, inside=RECEIVES)], []),  # for a message
    ([*BEHIND, at(1, world=6, waits=True, inside="time.sleep")], []),  # what it has started goes on beside it
    # On a GPU it does not matter where one stands still.
    ([at(rank, 1, world=5 + rank % 2, backend="nccl") for rank in range(3)], [1]),
    ([at(0), at(1, 3, waits=True), at(2)], []),  # without counters waiting must last
    ([at(0), at(1, 7, waits=True), at(2)], [1]),
    ([at(0, world=5), at(1, 10, world=5, waits=True), at(2, 10, world=5, waits=True)], []),
    ([at(0, world=5), at(1, 16, world=5, waits=True), at(2, 16, world=5, waits=True)], [1, 2]),  # both wait
    ([*BEHIND, RankStatus(1)], []),  # no answer this time
)
def test_who_is_stuck(diagnosis, answers, stuck):
    diagnosis.note(at(rank, waits=True, world=9) for rank in range(3))  # an earlier answer does not count
    diagnosis.note(answers)
    assert diagnosis.stuck([1, 2]) == stuck


def hear(diagnosis, clock, seconds, *answers):
    """Let ranks give the same answers for a while."""
    for _ in range(seconds + 1):
        diagnosis.note(answers)
        clock[0] += 1


def test_silence_counts_unless_the_process_is_seen(diagnosis, clock):
    hear(diagnosis, clock, 30, at(0), RankStatus(1), RankStatus(2, alive=True))
    assert diagnosis.gone([1, 2]) == []
    hear(diagnosis, clock, 100, at(0), RankStatus(1), RankStatus(2, alive=True))
    assert diagnosis.gone([1, 2]) == [1]
