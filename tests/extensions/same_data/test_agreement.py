"""What two ranks read, compared: an error, a warning, or nothing."""

import pytest
import torch.distributed as dist

from accelerate.extensions.same_data import agreement
from accelerate.extensions.same_data.agreement import Agreement, difference
from accelerate.extensions.same_data.contents import Arrangements
from cases import cases


def facts(rank, data=(), **more):
    return {"rank": rank, "tables": [], "arrangements": Arrangements(list(data)).describe(), **more}


def rows(order, items=None, sketch=()):
    return ["the table", order, items, sketch, items is not None]


NAMES = [f"file {number}" for number in range(40)]
MANY = [f"file {number}" for number in range(60_000)]


@cases(
    "first, own, outcome",
    (facts(0), facts(1), None),
    (facts(0, order="a"), facts(1, order="a"), None),
    (facts(0, order="a"), facts(1, order=None), None),
    (facts(0, order="a"), facts(1, order="b"), (True, "rank 0 and rank 1 draw different orders")),
    (facts(3, samples=7), facts(1, samples=8), (True, "length of the dataset is 8 on rank 1, but 7 on rank 3")),
    (facts(0, length=7), facts(1, length=8), (True, "length of the sampler")),
    (facts(0, shuffles="a"), facts(1, shuffles="b"), (True, "different seeds")),
    (facts(0, stream="a"), facts(1, stream="b"), (False, "begins with different samples")),
    (facts(0, tables=[(4, rows("a"))]), facts(1, tables=[(4, rows("b"))]), (False, "is different on")),
    (facts(0, tables=[(4, rows("a"))]), facts(1, tables=[(5, rows("b"))]), None),
    (facts(0, tables=[(4, rows("a", 7))]), facts(1, tables=[(4, rows("b", 7))]), (True, "different order")),
    (
        facts(0, tables=[(4, rows("a", 7))], dispatched=True),
        facts(1, tables=[(4, rows("b", 7))], dispatched=True),
        None,
    ),
    (
        facts(0, tables=[(4, rows("a", 7, [1]))], dispatched=True),
        facts(1, tables=[(4, rows("b", 8, [1]))], dispatched=True),
        (False, "drawn differently"),
    ),
    (facts(0, NAMES), facts(1, NAMES[::-1]), (True, "the list has a different order")),
    (facts(0, NAMES[:30]), facts(1, NAMES[10:]), (True, "the list was drawn differently")),
    (facts(0, NAMES[:20]), facts(1, NAMES[20:]), (False, "each rank reads a part")),
    (facts(0, [f"/node0/{name}" for name in NAMES]), facts(1, [f"/node1/{name}" for name in NAMES]), None),
    (facts(0, MANY), facts(1, MANY[::-1]), (False, "the list is different")),
    (facts(0, ["a", "a"]), facts(1, ["b", "b"]), (False, "the list is different")),
    (facts(0, NAMES, stream="a"), facts(1, NAMES[::-1], stream="b"), (True, "different order")),
)
def test_difference_between_two_ranks(first, own, outcome):
    for one, other in ((first, own), (own, first)):
        found = difference(one, other)
        if outcome is None:
            assert found is None
        else:
            assert found[0] is outcome[0] and outcome[1] in found[1] and "already_sharded=True" in found[1]


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks of one process that share a store."""
    present, store = {"rank": 0}, dist.HashStore()
    monkeypatch.setattr(agreement, "_store", lambda: store)
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.0)
    monkeypatch.setattr(agreement.dist, "get_rank", lambda: present["rank"])
    monkeypatch.setattr(agreement.dist, "get_world_size", lambda: 2)
    loaders = [Agreement(range(8), True, True) for _ in range(2)]
    loaders[1].name = loaders[0].name

    def read(rank, batches, epoch, order):
        present["rank"] = rank
        batches = iter(batches)
        yield from loaders[rank].compared(batches, epoch, lambda: (order, 8))
        yield from batches

    return read, store


def test_late_rank_is_compared_and_the_first_learns_of_it(ranks):
    read, _ = ranks
    early = read(0, range(9), 0, "a")
    assert [next(early), next(early)] == [0, 1]
    with pytest.raises(RuntimeError, match="test_agreement.py:.*different orders"):
        list(read(1, range(9), 0, "b"))
    with pytest.raises(RuntimeError, match="different orders"):
        list(early)


def test_epochs_are_compared_with_the_same_epoch(ranks):
    read, store = ranks
    assert list(read(0, [1, 2], 0, "a")) == [1, 2] and list(read(0, [], 1, "b")) == []
    assert list(read(0, [1], 1, "c")) == [1], "the epoch is begun a second time"
    assert list(read(1, [1, 2], 0, "a")) == [1, 2] and list(read(1, [1], 1, "b")) == [1]
    assert store.num_keys() < 9, "messages of earlier epochs are deleted"


def test_store_that_has_ended_ends_the_comparison(ranks, monkeypatch):
    read, store = ranks

    class Ended:
        def __getattr__(self, name):
            def fail(*arguments):
                raise dist.DistNetworkError("connection closed")

            return fail

    monkeypatch.setattr(agreement, "_store", Ended)
    assert list(read(0, [1, 2, 3], 0, "a")) == [1, 2, 3]
