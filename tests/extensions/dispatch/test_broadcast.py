"""What the dispatching process sends to the others, and how batches are cut and joined."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from accelerate.extensions.dispatch.dividing import Divider, agreed_length
from accelerate.extensions.dispatch.scatter import Scatter
from cases import cases
from dispatch_samples import CPU, Line

DIVIDER = Divider(lists_are_samples=True, remedy="Do something else.")


class Connection:
    """Both ends of a connection, within this process."""

    def __init__(self):
        self.sent = []
        self.sender = Scatter(Line(self.sent, 0), None, None, CPU, (0, 1))
        self.line = Line([], 1)
        self.receiver = Scatter(self.line, None, None, CPU, (0, 1))

    def pass_on(self, number, parts):
        """Send and receive; return what arrived on rank 1."""
        self.sent.clear()
        self.sender.send(number, parts)
        self.line.sent.extend(self.sent)
        return self.receiver.receive()


def test_received_batches_do_not_share_memory():
    connection = Connection()
    messages = [connection.pass_on(n, [torch.zeros(1), torch.full((1,), n)]) for n in range(4)]
    assert [(number, wait().tolist()) for number, wait in messages] == [(n, [n]) for n in range(4)]


def test_a_small_batch_travels_with_its_header():
    connection = Connection()
    small, large, text = torch.arange(9), torch.zeros(1020), "t" * 5000
    batches = [
        [small],
        [small + 1],
        {"x": small[:2]},
        [small, small],
        [large],
        [large],
        [small],
        text,
        [text, large],
        [],
    ]
    operations = []
    for batch in batches:
        _, wait = connection.pass_on(4, [small, batch])
        operations.append(len(connection.sent))
        assert str(wait()) == str(batch)
    # 4,096 bytes of a body fit only if the description is that of the batch before; 5,000 bytes of text never do.
    assert operations == [1, 1, 1, 1, 2, 1, 1, 2, 2, 1]


def test_processes_that_are_not_in_step_are_told():
    connection = Connection()
    connection.pass_on(2, [torch.zeros(2)])
    connection.receiver.sequence += 1
    with pytest.raises(RuntimeError, match="not in step"):
        connection.pass_on(2, [torch.zeros(2)])


# -- cutting and joining batches ----------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


def batch_of(start, stop):
    numbers = torch.arange(start, stop)
    return OrderedDict(
        ids=numbers,
        pair=Pair(numbers.view(-1, 1), [numbers]),
        text=[f"s{n}" for n in range(start, stop)],
        note="n",
        k=3,
    )


def test_consecutive_batches_are_divided_as_one():
    batches, sizes = [batch_of(0, 2), batch_of(2, 3), batch_of(3, 7)], [2, 1, 4]
    whole, part = DIVIDER.divide(batches, sizes, [(0, 7), (2, 5)])
    assert type(whole) is OrderedDict and type(whole["pair"]) is Pair
    assert str(whole) == str(batch_of(0, 7)) and str(part) == str(batch_of(2, 5))
    assert agreed_length(whole) == 7 and agreed_length({**whole, "other": torch.zeros(3)}) is None


ROWS, ODD = torch.zeros(2, 3), torch.zeros(3, 3)


@cases(
    "batches, message",
    ([ROWS, torch.zeros(2, 4)], "batch differs between batches"),
    ([[ROWS], [ROWS, ROWS]], "batch differs between batches .*keys .0."),
    ([{"x": ROWS, "name": "a"}, {"x": ROWS, "name": "b"}], r"batch\['name'\] .*'a' is the same .* 'b'"),
    ([{"x": ROWS, "image": (ODD,)}], r"batch\['image'\]\[0\] has 3 rows, and the batch has 2 samples"),
    ([{"x": ROWS, "words": ["a"]}], r"batch\['words'\] has 1 items"),
    ([{"x": ROWS.to_sparse()}], r"batch\['x'\] is a sparse tensor"),
    ([Pair(ROWS, [{"a": ROWS}, {"a": ROWS}])], r"batch\.y has 2 items with 2 rows each"),
    ([[ROWS, ROWS]], "batch has 2 items with 2 rows each"),
)
def test_batches_that_cannot_be_divided_are_refused(batches, message):
    with pytest.raises(ValueError, match=f"cannot be divided among the ranks: {message}.*Do something else."):
        DIVIDER.divide(batches, [2] * len(batches), [(0, 1), (1, 2)])


@cases(
    "batch, second",
    ((ROWS, ROWS + 1), (ROWS[1:], ROWS[1:] + 1)),  # as (inputs, targets) are collated
    ([ROWS, torch.arange(2)], [ROWS[1:], torch.tensor([1])]),
    ([ROWS, ODD], [ODD]),  # images of different sizes
    ([[1, 2, 3], [4]], [[4]]),
    ((ROWS, [{"boxes": ROWS}, {"boxes": ODD}]), (ROWS[1:], [{"boxes": ODD}])),
    ({"x": ROWS, "labels": ({"name": "a"}, {"name": "b"})}, {"x": ROWS[1:], "labels": ({"name": "b"},)}),
)
def test_a_list_with_an_item_per_sample_is_divided(batch, second):
    assert repr(DIVIDER.divide([batch], [2], [(0, 1), (1, 2)])[1]) == repr(second)


def test_another_batch_tells_structure_from_samples():
    for witness, second in (([torch.zeros(4, 3)] * 2, [ROWS[1:]] * 2), ([torch.zeros(2, 3)] * 4, [ROWS])):
        divider = Divider(lists_are_samples=True, remedy="")
        divider.witness = witness, 4
        assert repr(divider.divide([[ROWS, ROWS]], [2], [(0, 1), (1, 2)])[1]) == repr(second)
    assert len(Divider(False, "").divide([[ROWS, ROWS]], [2], [(0, 1), (1, 2)])[1]) == 2


def test_the_size_of_a_batch():
    assert DIVIDER.size({"x": ODD}, None) == DIVIDER.size((ODD, [{"a": ROWS}] * 3), None) == 3
    assert DIVIDER.size({"x": ODD, "y": ODD}, 4) == 3, "a collate_fn has skipped one"
    assert DIVIDER.size({"x": ODD[:1]}, 4) == DIVIDER.size({"x": torch.zeros(9)}, 4) == 4, "packed"
    assert DIVIDER.size([ODD] * 4, 4) == 4 and DIVIDER.size([ODD] * 3, 4) == 4, "a list of images"
    for batch, message in (({"n": 3}, "without a tensor"), ({"x": ODD, "y": ROWS}, "'x'. has 3, .*'y'. has 2")):
        with pytest.raises(ValueError, match=message):
            DIVIDER.size(batch, None)
