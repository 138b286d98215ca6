"""Which evidence lets a missing rank pass for stuck."""

import pytest
import torch.distributed as dist

from accelerate.diagnostics import hang
from accelerate.diagnostics.hang import Diagnosis, RankStatus
from cases import cases


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


RECEIVES = "torch.distributed.c10d_logger.wrapper > torch.distributed.distributed_c10d.recv"
BEHIND = [at(0, world=5), at(2, world=5)]


@cases(
    "seconds, answers, stuck",
    (1, [*BEHIND, at(1, world=6, waits=True)], [1]),  # in a collective that we have not joined
    (-1, [*BEHIND, at(1, world=6, waits=True)], []),  # one answer is not enough
    # Rank 1 has started nothing that rank 0 has not: it waits for rank 2, which computes.
    (100, [*BEHIND, at(1, world=5, pair=3, waits=True)], []),
    (100, [*BEHIND, at(1, world=9)], []),  # it computes, and gloo counts messages between two ranks as well
    (100, [*BEHIND, at(1, world=6, waits=True, inside=RECEIVES)], []),  # for a message
    # On a GPU it does not matter where one stands still.
    (1, [at(rank, world=5 + rank % 2, backend="nccl") for rank in range(3)], [1]),
    (3, [at(0), at(1, waits=True), at(2)], []),  # without counters waiting must last
    (7, [at(0), at(1, waits=True), at(2)], [1]),
    (10, [at(0, world=5), at(1, world=5, waits=True), at(2, world=5, waits=True)], []),
    (16, [at(0, world=5), at(1, world=5, waits=True), at(2, world=5, waits=True)], [1, 2]),  # both wait
)
def test_who_is_stuck(diagnosis, clock, seconds, answers, stuck):
    hear(diagnosis, clock, max(seconds, 0), *answers)
    clock[0] += min(seconds, 0)
    assert diagnosis.stuck([1, 2]) == stuck


def test_who_moves_is_not_stuck(diagnosis, clock):
    hear(diagnosis, clock, 1, at(0, world=5), at(1, world=6, waits=True), at(2, world=5))
    diagnosis.observations[1].add(clock[0], at(1, world=6, waits=True, position="elsewhere"))
    assert diagnosis.stuck([1, 2]) == []


def test_silence_counts_unless_the_process_is_seen(diagnosis, clock):
    hear(diagnosis, clock, 30, at(0), RankStatus(1), RankStatus(2, alive=True))
    assert diagnosis.gone([1, 2]) == []
    hear(diagnosis, clock, 100, at(0), RankStatus(1), RankStatus(2, alive=True))
    assert diagnosis.gone([1, 2]) == [1]
