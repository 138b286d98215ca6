"""What the dispatching process sends to the others, and how batches are cut and joined."""

from collections import OrderedDict, namedtuple

import numpy
import pytest
import torch

from accelerate.data import broadcast
from accelerate.data.broadcast import BatchBroadcast, Message
from loader_samples import CPU, Line


class Connection:
    """Both ends of a connection, within this process."""

    def __init__(self):
        self.sent = []
        self.sender = BatchBroadcast(Line(self.sent, sends=True), CPU)
        self.line = Line([], sends=False)
        self.receiver = BatchBroadcast(self.line, CPU)

    def pass_on(self, value):
        """Send and receive; returns what arrived."""
        self.sent.clear()
        self.sender.send(value)
        self.line.sent.extend(self.sent)
        return self.receiver.receive()


def message(batch, sizes=(1, 1), real=2, last=False):
    return Message(batch, real, sizes, last)


def test_batches_arrive_as_they_were_sent():
    connection = Connection()
    batch = {
        "x": torch.arange(6.0).view(2, 3),
        "list": [torch.tensor(7), (torch.zeros(0, 4, dtype=torch.bool), torch.ones(2, dtype=torch.bfloat16))],
        "text": ["a", "b"],
        "array": numpy.arange(3),
        "none": None,
        "view": torch.arange(8).view(2, 4).t()[::2],
        "weight": torch.ones(2, requires_grad=True),
    }
    for _ in range(3):
        arrived = connection.pass_on(message(batch, real=1, last=True))
        got = arrived.batch
        assert (arrived.real, arrived.sizes, arrived.last) == (1, (1, 1), True)
        assert list(got) == list(batch) and got["text"] == ["a", "b"] and got["none"] is None
        assert torch.equal(got["x"], batch["x"]) and torch.equal(got["view"], batch["view"])
        assert got["list"][0].shape == () and got["list"][0] == 7
        assert type(got["list"][1]) is tuple and got["list"][1][0].shape == (0, 4)
        assert got["list"][1][1].dtype == torch.bfloat16 and got["array"].tolist() == [0, 1, 2]
        assert torch.equal(got["weight"], torch.ones(2))


def test_received_batches_do_not_share_memory():
    connection = Connection()
    batches = [connection.pass_on(message(torch.full((2,), n))).batch for n in range(4)]
    assert [batch.tolist() for batch in batches] == [[n, n] for n in range(4)]


def test_processes_that_are_not_in_step_are_told():
    connection = Connection()
    connection.pass_on(message(torch.zeros(2)))
    connection.receiver.sequence += 1
    with pytest.raises(RuntimeError, match="not in step"):
        connection.pass_on(message(torch.zeros(2)))


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
    whole = broadcast.join([batch_of(0, 2), batch_of(2, 3), batch_of(3, 7)])
    assert type(whole) is OrderedDict and type(whole["pair"]) is Pair
    assert str(whole) == str(batch_of(0, 7))
    assert broadcast.batch_length(whole) == 7
    assert str(broadcast.take(whole, 2, 5)) == str(batch_of(2, 5))


def test_batches_that_differ_are_refused():
    row = torch.zeros(2)
    for batches in ([torch.zeros(2, 3), torch.zeros(2, 4)], [[row], [row, row]]):
        with pytest.raises(ValueError, match="cannot be joined"):
            broadcast.join(batches)
