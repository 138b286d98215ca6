"""What two ranks read, compared: an error, a warning, or nothing."""

import pytest

from accelerate.data.agreement import difference
from accelerate.data.contents import Arrangements


def facts(rank, data=(), **more):
    return {"rank": rank, "tables": [], "arrangements": Arrangements(list(data)).describe(), **more}


NAMES = [f"file {number}" for number in range(40)]


@pytest.mark.parametrize(
    ("first", "own", "outcome"),
    [
        (facts(0), facts(1), None),
        (facts(0, order="a"), facts(1, order="a"), None),
        (facts(0, order="a"), facts(1, order=None), None),
        (facts(0, order="a"), facts(1, order="b"), (True, "rank 0 and rank 1 draw different orders")),
        (facts(3, samples=7), facts(1, samples=8), (True, "length of the dataset is 8 on rank 1, but 7 on rank 3")),
        (facts(0, length=7), facts(1, length=8), (True, "length of the sampler")),
        (facts(0, shuffles="a"), facts(1, shuffles="b"), (True, "different seeds")),
        (facts(0, stream="a"), facts(1, stream="b"), (False, "begins with different samples")),
        (facts(0, tables=[(4, "a")]), facts(1, tables=[(4, "b")]), (False, "different rows")),
        (facts(0, tables=[(4, "a")]), facts(1, tables=[(5, "b")]), None),
        (facts(0, NAMES), facts(1, NAMES[::-1]), (True, "the list has a different order")),
        (facts(0, NAMES[:30]), facts(1, NAMES[10:]), (True, "the list was drawn differently")),
        (facts(0, NAMES[:20]), facts(1, NAMES[20:]), (False, "each rank reads a part")),
        (facts(0, ["a", "a"]), facts(1, ["b", "b"]), (False, "the list is different")),
        (facts(0, NAMES, stream="a"), facts(1, NAMES[::-1], stream="b"), (True, "different order")),
    ],
)
def test_difference_between_two_ranks(first, own, outcome):
    for one, other in ((first, own), (own, first)):
        found = difference(one, other)
        if outcome is None:
            assert found is None
        else:
            assert found[0] is outcome[0] and outcome[1] in found[1] and "already_sharded=True" in found[1]
