"""Which evidence lets a missing rank pass for stuck; what a report says of ranks that wait, from the answers of all ranks; and what torch's flight recorder says of one."""

import sys
import threading

import pytest
import torch.distributed as dist
from torch import nn

from accelerate.extensions.hang import hang, monitor, status, threads
from accelerate.extensions.hang.monitor import Finding, Monitor, limits
from accelerate.extensions.hang.status import Diagnosis, RankStatus
from accelerate.extensions.hang.threads import oldest_open
from cases import cases

# As torch 2.13 writes them: gloo leaves the state alone, NCCL's entries say how far the GPU has come.
GLOO = {"profiling_name": "gloo:all_reduce", "collective_seq_id": 1, "is_p2p": False}
GLOO |= {"state": "scheduled", "record_id": 6}
NCCL = {"profiling_name": "nccl:_all_gather_base", "collective_seq_id": 41, "p2p_seq_id": 3}
NCCL |= {"input_dtypes": ["BFloat16"]}
NCCL |= {"input_sizes": [[8, 4096]], "is_p2p": False, "retired": False, "state": "started", "record_id": 7}


@cases(
    "entries, found",
    ([{**GLOO, "retired": True}], None),
    ([{**GLOO, "retired": True}, GLOO], {"operation": "all_reduce", "number": 1, "shapes": ""}),
    ([{**NCCL, "state": "completed"}], None),  # the watchdog has not retired it yet
    (
        # The clock was set back between the two.
        [{**NCCL, "record_id": 8, "collective_seq_id": 42, "time_created_ns": 5}, {**NCCL, "time_created_ns": 9}],
        {"operation": "_all_gather_base", "number": 41, "shapes": "BFloat16 [8, 4096]"},
    ),
    ([{**NCCL, "is_p2p": True}], {"operation": "_all_gather_base", "number": 3, "shapes": "BFloat16 [8, 4096]"}),
)
def test_what_a_rank_waits_in(entries, found):
    assert oldest_open(entries) == found


def waits(rank, operation="all_reduce", line=7, **more):
    return RankStatus(rank, True, site=f"x.py:{line} in f", still_s=12, operation=operation, number=5, **more)


HERE = [waits(0), waits(1), waits(3)]


@cases(
    "last, head, cause",
    (
        waits(2, "barrier", 9),
        "Hang: ranks 0, 1, 3 have waited for 12 s in all_reduce no. 5 at x.py:7 in f for rank 2",
        "rank 2 went past",
    ),
    (waits(2, "barrier", 5), "Hang: ", "ranks 0, 1, 3 went past"),
    (
        waits(2, "all_gather", 5, module="text.0"),
        "Hang: ",
        "early exit of a loop, or a module that not every rank calls (rank 2 in 'text.0'; declare",
    ),
    (waits(2, shapes="Float [3]"), "Hang: ", "different shapes"),
    (waits(2), "Slow: all ranks have been in all_reduce no. 5", "network"),
    (waits(2, "barrier", note="handles an exception (E: e)"), "Hang: ", "rank 2 handles an exception (E: e)"),
    (RankStatus(2, True, site="x.py:1 in g"), "Slow: ", "rank 2 runs at x.py:1 in g"),
    (
        RankStatus(2, True, site="x.py:1 in g", still_s=9, stack=["x.py:1 in g"]),
        "Slow: ",
        "a lock, a sleep, an input, a disk",
    ),
    (
        RankStatus(2, ended=True, note="E: e"),
        "Hang: ",
        "rank 2 has ended with E: e\n  Likely cause: rank 2 ended before",
    ),
    (RankStatus(2, alive=False), "Hang: ", "its process is gone"),
    (RankStatus(2, alive=True, note="running"), "Slow: ", "gives no answer, but its process exists (running)"),
)
def test_reports(last, head, cause):
    text = str(Finding({status.rank: status for status in [*HERE, last]}))
    assert text.startswith(head) and cause in text
    assert ("Likely cause" in text) is head.startswith("Hang")


def test_ranks_in_different_modules():
    answers = [waits(0, module="text"), waits(1, module="pictures", line=9), waits(2, module="pictures", line=9)]
    text = str(Finding({status.rank: status for status in answers}))
    assert "ranks 1, 2 have waited for 12 s in all_reduce no. 5 of module 'pictures' at x.py:9" in text
    assert (
        "a branch in the model, or a module that not every rank calls (rank 0 in 'text', ranks 1, 2 in 'pictures'"
        in text
    )


def test_seconds(monkeypatch):
    monkeypatch.setenv(monitor.ABORT_AFTER, "4")
    assert limits() == (4, 4)
    monkeypatch.setenv(monitor.REPORT_AFTER, "0")
    monkeypatch.setenv(monitor.ABORT_AFTER, "0")
    assert limits() == (float("inf"), float("inf"))
    monkeypatch.setenv(monitor.REPORT_AFTER, "soon")
    with pytest.raises(ValueError, match=f"{monitor.REPORT_AFTER} is 'soon'"):
        limits()


def test_one_rank_reports_and_says_nothing_twice(monkeypatch, caplog):
    monkeypatch.setattr(status, "INTERVAL_S", 0.02)
    monkeypatch.setattr(hang.threads, "waits_in", lambda frame: {"operation": "all_reduce"})
    monkeypatch.setattr(status, "STILL_S", 0.1)
    store, over = dist.HashStore(), threading.Event()
    stands = [threading.Thread(target=over.wait) for _ in range(2)]
    watchers = [
        hang.Watcher(store, rank, 2, each, Monitor(rank, 2, (0.2, float("inf")))) for rank, each in enumerate(stands)
    ]
    for each in (*stands, *watchers):
        each.start()
    stands[0].join(2.5)
    for each in watchers:
        each.stop()
    over.set()
    assert [record.getMessage()[:34] for record in caplog.records] == ["Slow: all ranks have been in all_r"]


def test_ranks_that_have_not_joined_are_named_once(monkeypatch, caplog):
    monkeypatch.setenv(monitor.REPORT_AFTER, "0.05")
    store = dist.HashStore()
    for rank in (0, 2):
        with monitor.joining(store, rank, 3):
            for thread in threading.enumerate():  # it may have ended
                if thread.name == "accelerate-joining":
                    thread.join()
    (record,) = caplog.records
    assert record.getMessage().startswith("Slow: rank 0 has waited for 0 s at ")
    assert " for ranks 1, 2 to join the process group." in record.getMessage()


def test_the_module_that_a_thread_calls():
    found = []

    class Inner(nn.Module):
        def forward(self, inputs):
            found.append(threads.module(sys._getframe()))
            return inputs

    class Changing(nn.Sequential):
        def named_modules(self, *args, **kwargs):
            raise RuntimeError("dictionary changed size during iteration")

    part = nn.Sequential(nn.Identity(), Inner())
    nn.Sequential(nn.Identity(), part)(1)
    Changing(part)(1)
    found.append(threads.module(sys._getframe()))
    assert found == ["1.1", "", ""]


# --- stuck ranks ---


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(hang.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def diagnosis(clock):
    return Diagnosis(dist.HashStore(), [0, 1, 2], 3, again=1)


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
    ([*BEHIND, at(1, world=6, waits=True, inside="time.sleep")], []),  # what it has started continues next to it
    # On a GPU the line of the pause does not matter.
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
