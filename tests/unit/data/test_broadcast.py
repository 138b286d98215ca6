"""What the dispatching process sends to the others, and how batches are cut and joined."""

from collections import OrderedDict, namedtuple

import numpy
import pytest
import torch

from accelerate.data import dispatcher
from accelerate.data.dispatcher import BatchScatter, Round
from loader_samples import CPU, Line


class Connection:
    """Both ends of a connection, within this process."""

    def __init__(self, places=(0, 1)):
        self.sent = []
        self.sender = BatchScatter(Line(self.sent, 0), None, None, CPU, places)
        self.line = Line([], 1)
        self.receiver = BatchScatter(self.line, None, None, CPU, places)

    def pass_on(self, message):
        """Send and receive; returns what arrived on rank 1, and what the sender keeps."""
        self.sent.clear()
        kept = self.sender.send(message)
        self.line.sent.extend(self.sent)
        return self.receiver.receive(), kept


def test_parts_arrive_as_they_were_sent():
    connection = Connection()
    batch = {
        "x": torch.arange(6.0).view(2, 3),
        "list": [torch.tensor(7), (torch.zeros(2, 0, dtype=torch.bool), torch.ones(2, dtype=torch.bfloat16))],
        "text": ["a", "b"],
        "array": numpy.arange(4).reshape(2, 2),
        "none": None,
        "view": torch.arange(8).view(2, 4).t()[::2],
        "weight": torch.ones(2, requires_grad=True),
    }
    for number in range(3):
        arrived, kept = connection.pass_on(Round(batch, (1, 0), 1, 1, 2))
        got, counts = arrived.batch()
        assert counts == (1, 0)
        assert (arrived.real, arrived.width, arrived.longer) == (1, 1, 2)
        assert list(got) == list(batch) and got["text"] == ["b"] and got["none"] is None
        assert torch.equal(got["x"], batch["x"][1:]) and torch.equal(got["view"], batch["view"][1:])
        assert got["list"][0].shape == () and got["list"][0] == 7
        assert type(got["list"][1]) is tuple and got["list"][1][0].shape == (1, 0)
        assert got["list"][1][1].dtype == torch.bfloat16 and got["array"].tolist() == [[2, 3]]
        assert torch.equal(got["weight"], torch.ones(1))
        assert kept.batch()[0]["text"] == ["a"] and torch.equal(kept.batch()[0]["x"], batch["x"][:1])
        assert len(connection.sent) == (3 if number == 0 else 2), "what a part looks like is told once"


def test_a_part_of_another_form_is_described_anew():
    connection = Connection()
    for width in (1, 1, 3):
        [arrived, _] = connection.pass_on(Round({"x": torch.zeros(2, width), "n": ["a", "b"]}, None, 2, 1, 2))
        assert arrived.batch()[0]["x"].shape == (1, width)


def test_parts_may_differ_in_length_and_be_shared():
    connection = Connection(places=(0, 2))
    [arrived, kept] = connection.pass_on(Round({"x": torch.arange(8)}, None, 8, 3, 2))
    assert (kept.batch()[0]["x"].tolist(), arrived.batch()[0]["x"].tolist()) == ([0, 1, 2], [6, 7])
    [arrived, _] = Connection(places=(0, 0)).pass_on(Round(torch.arange(3), None, 3, 3, 1))
    assert arrived.batch()[0].tolist() == [0, 1, 2]
    [arrived, _] = Connection(places=None).pass_on(Round(torch.arange(4), None, 4, 2, 2))
    assert arrived.batch()[0].tolist() == [0, 1, 2, 3]


def test_received_batches_do_not_share_memory():
    connection = Connection()
    batches = [connection.pass_on(Round(torch.full((2,), n), None, 2, 1, 2))[0].batch()[0] for n in range(4)]
    assert [batch.tolist() for batch in batches] == [[n] for n in range(4)]


def test_processes_that_are_not_in_step_are_told():
    connection = Connection()
    connection.pass_on(Round(torch.zeros(2), None, 2, 1, 2))
    connection.receiver.sequence += 1
    with pytest.raises(RuntimeError, match="not in step"):
        connection.pass_on(Round(torch.zeros(2), None, 2, 1, 2))


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


def test_cut_and_join_are_inverse():
    whole = dispatcher.join([batch_of(0, 2), batch_of(2, 3), batch_of(3, 7)])
    assert type(whole) is OrderedDict and type(whole["pair"]) is Pair
    assert str(whole) == str(batch_of(0, 7))
    assert dispatcher.batch_length(whole) == 7
    assert str(dispatcher.take(whole, 2, 5)) == str(batch_of(2, 5))


def test_batches_that_differ_are_refused():
    row = torch.zeros(2)
    for batches in ([torch.zeros(2, 3), torch.zeros(2, 4)], [[row], [row, row]]):
        with pytest.raises(ValueError, match="cannot be joined"):
            dispatcher.join(batches)
