"""Ending together, with the other processes played by the test; tests/distributed/test_streams.py has real ones."""

import logging
import re

import pytest
import torch

from accelerate import comm
from accelerate.comm.base import Communicator
from accelerate.data import agree

READY, ENDED, FAILED = 0, 1, 2


class Partner(Communicator):
    """Two processes, of which the other one does what a script says, step by step.

    Args:
        script: its statuses; a tuple is its whole vote.
        text: what it tells of its error.
    """

    rank, world_size = 0, 2

    def __init__(self, *script, text=None):
        self.script, self.text, self.step, self.votes = list(script), text, 0, []

    def all_reduce(self, tensor, op="sum"):
        own = tensor[0].tolist()
        self.votes.append(own)
        said = self.script[self.step]
        tensor[1] = torch.tensor(said if isinstance(said, tuple) else (own[0], self.step, said))
        self.step += 1
        return tensor

    def gather_object(self, obj):
        return [obj, self.text]

    def all_gather_into_list(self, tensor):
        raise AssertionError("not needed")

    broadcast = broadcast_object_list = barrier = all_gather_into_list


@pytest.fixture
def partner(monkeypatch):
    def build(*script, **options):
        made = Partner(*script, **options)
        monkeypatch.setattr(comm, "current", lambda: made)
        return made

    return build


def test_alone_nothing_is_agreed_on():
    assert list(agree.in_step(iter("abc"))) == ["a", "b", "c"]


def test_equal_ends_leave_nothing_over(partner, caplog):
    other = partner(READY, READY, ENDED)
    assert list(agree.in_step(iter("ab"))) == ["a", "b"]
    assert [vote[1:] for vote in other.votes] == [[0, READY], [1, READY], [2, ENDED]]
    assert not caplog.records


@pytest.mark.parametrize(
    ("mine", "script", "want", "line"),
    [
        ("abc", (READY, ENDED), "a", "The data of rank 1 ended after 1 batches.*rank 0 had"),
        ("a", (READY, READY), "a", "The data of rank 0 ended after 1 batches.*rank 1 had"),
        ("", (READY,), "", "The data of rank 0 ended after 0 batches"),
        ("abc", (ENDED,), "", "The data of rank 1 ended after 0 batches"),
    ],
)
def test_all_stop_at_the_shortest(partner, caplog, mine, script, want, line):
    partner(*script)
    with caplog.at_level(logging.WARNING):
        assert "".join(agree.in_step(iter(mine))) == want
    [record] = caplog.records
    assert re.search(line, record.getMessage())


def test_every_loop_is_told_from_the_one_before(partner):
    first, second = partner(ENDED), None
    list(agree.in_step(iter("")))
    second = partner(ENDED)
    list(agree.in_step(iter("")))
    assert second.votes[0][0] == first.votes[0][0] + 1


def broken(*items):
    yield from items
    raise OSError("row 5")


def test_the_error_itself_is_raised_where_it_happened(partner):
    partner(READY, READY)
    steps = agree.in_step(broken("a"))
    with pytest.raises(OSError, match="row 5"):
        assert next(steps) == "a"
        next(steps)


def test_the_others_are_told_whose_error_it_was(partner):
    partner(READY, FAILED, text="OSError: row 5")
    steps = agree.in_step(iter("abc"))
    assert next(steps) == "a"
    with pytest.raises(RuntimeError, match=r"batch 1 .*rank 1 failed \(OSError: row 5\)"):
        next(steps)


def test_an_error_comes_before_an_end(partner):
    partner(FAILED, text="OSError: row 0")
    with pytest.raises(RuntimeError, match="rank 1 failed"):
        list(agree.in_step(iter("")))


def test_processes_at_different_places_are_told(partner):
    partner((10**6, 4, READY))
    with pytest.raises(RuntimeError, match=r"rank 0 reads batch 0 .*rank 1 batch 4 of its loop number 1000000"):
        list(agree.in_step(iter("abc")))


def test_paused_loops_end_where_their_own_data_ends(partner):
    other = partner()
    with agree.paused(), agree.paused():
        assert list(agree.in_step(iter("ab"))) == ["a", "b"]
    with pytest.raises(ZeroDivisionError), agree.paused():
        raise ZeroDivisionError
    assert not other.votes
    partner(ENDED)
    assert list(agree.in_step(iter("ab"))) == []


def test_what_belongs_to_a_batch_is_that_of_its_own_read(partner):
    class Notes:
        before = None

    def reading():
        for number in range(3):
            Notes.before = f"before {number}"
            yield number
        Notes.before = "after"

    partner(READY, READY, READY, ENDED)
    seen = [(number, Notes.before) for number in agree.in_step(reading(), ((Notes, "before"),))]
    assert seen == [(number, f"before {number}") for number in range(3)]
    assert Notes.before == "after"


def test_one_batch_is_read_ahead(partner):
    read = []

    def reading():
        for number in range(3):
            read.append(number)
            yield number

    partner(*[READY] * 3, ENDED)
    steps = agree.in_step(reading())
    assert next(steps) == 0 and read == [0, 1]
    assert next(steps) == 1 and read == [0, 1, 2]
    steps.close()


def test_votes_of_real_groups_travel_in_a_group_of_their_own(process_group, monkeypatch):
    communicator = comm.for_type("MULTI_CPU")
    assert agree._group(communicator) is agree._group(communicator) is not communicator.group
    start = agree._voting(communicator)
    assert start((7, 2, ENDED))() == [(7, 2, ENDED)]

    def lost(*args, **options):
        class Work:
            def wait(self):
                raise RuntimeError("Connection closed by peer")

        return Work()

    monkeypatch.setattr(agree.dist, "all_reduce", lost)
    with pytest.raises(RuntimeError, match="A process was lost"):
        start((7, 3, READY))()
