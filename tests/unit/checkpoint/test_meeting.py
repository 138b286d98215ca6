"""The end of a save on several ranks, played by threads."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from accelerate.checkpoint import meeting
from accelerate.checkpoint.meeting import Meeting


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", timedelta(seconds=0.05))
    monkeypatch.setattr(meeting, "_alone", False)
    monkeypatch.setattr(meeting, "_calls", meeting.collections.Counter())


def hold(ranks, world_size=2, problems=(), store=None):
    """Let ranks meet; return what each of them raised, and who published."""
    store = store or dist.HashStore()
    published, raised = [], {}
    meetings = {}
    for rank in ranks:
        meeting._calls.clear()  # the ranks are threads of one process here
        meetings[rank] = Meeting("a/folder", rank, world_size, store)

    def end(rank):
        try:
            meetings[rank].end(dict(problems).get(rank), lambda: published.append(rank))
        except Exception as error:
            raised[rank] = error

    threads = [threading.Thread(target=end, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return raised, published


def test_one_process_publishes_at_once():
    published = []
    Meeting("folder", 0, 1, None).end(None, lambda: published.append(0))
    assert published == [0]


def test_one_process_does_not_publish_what_failed():
    published = []
    with pytest.raises(OSError, match="full"):
        Meeting("folder", 0, 1, None).end(OSError("full"), lambda: published.append(0))
    assert published == []


def test_rank_0_publishes_first_and_the_others_after_it():
    raised, published = hold([0, 1, 2], world_size=3)
    assert raised == {} and published[0] == 0 and sorted(published) == [0, 1, 2]


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_fail_together(failing):
    raised, published = hold([0, 1], problems={failing: OSError("disk full")})
    assert isinstance(raised[failing], OSError)
    assert isinstance(raised[1 - failing], RuntimeError)
    assert f"Rank {failing}: OSError: disk full" in str(raised[1 - failing])
    assert published == []


@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_nobody_joins_goes_on_and_says_so_once(alone, caplog):
    store = dist.HashStore()
    raised, published = hold([alone], store=store)
    assert raised == {} and published == ([0] if alone == 0 else [])
    assert f"called by rank {alone}, but not by rank {1 - alone}" in caplog.text
    caplog.clear()
    hold([alone], store=dist.HashStore())
    assert caplog.text == ""


def test_there_is_no_store_without_a_group_of_several():
    assert meeting.default_store() is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert meeting.default_store() is None
    finally:
        dist.destroy_process_group()
