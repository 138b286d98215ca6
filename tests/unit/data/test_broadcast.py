"""What the dispatching process sends to the others, and how batches are cut and joined."""

import pickle
from collections import OrderedDict, deque, namedtuple

import numpy
import pytest
import torch

from accelerate.data import broadcast
from accelerate.data.broadcast import BatchBroadcast, Message


class Line:
    """One direction of a connection, within this process."""

    def __init__(self):
        self.sent = deque()
        self.sends = True

    def tensor(self, tensor):
        if self.sends:
            self.sent.append(tensor.clone())
        else:
            arrived = self.sent.popleft()
            assert arrived.numel() == tensor.numel(), "both sides have to agree on the size"
            tensor.copy_(arrived)

    def object(self, value=None):
        if self.sends:
            self.sent.append(value)
            return value
        return self.sent.popleft()


class Connection:
    def __init__(self, shards=2, stages=False):
        self.line = Line()
        self.sender, self.receiver = (BatchBroadcast(self.line, shards, torch.device("cpu")) for _ in range(2))
        for end in (self.sender, self.receiver):
            end._stages = stages  # as on an accelerator: filled on the host, sent from the device

    def pass_on(self, message):
        """Send and receive; returns what arrived and how many broadcasts that took."""
        self.line.sends = True
        self.sender.send(message)
        broadcasts = len(self.line.sent)
        return self.receive(), broadcasts

    def receive(self):
        self.line.sends = False
        return self.receiver.receive()


def message(batch, sizes=(1, 1), real=2, last=False):
    return Message(batch, real, sizes, last)


@pytest.fixture(params=[False, True], ids=["bytes", "staged"])
def connection(request):
    return Connection(stages=request.param)


def test_batches_arrive_as_they_were_sent(connection):
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
        arrived, _ = connection.pass_on(message(batch, real=1, last=True))
        got = arrived.batch
        assert (arrived.real, arrived.sizes, arrived.last) == (1, (1, 1), True)
        assert list(got) == list(batch) and got["text"] == ["a", "b"] and got["none"] is None
        assert torch.equal(got["x"], batch["x"]) and torch.equal(got["view"], batch["view"])
        assert got["list"][0].shape == () and got["list"][0] == 7
        assert type(got["list"][1]) is tuple and got["list"][1][0].shape == (0, 4)
        assert got["list"][1][1].dtype == torch.bfloat16 and got["array"].tolist() == [0, 1, 2]
        assert torch.equal(got["weight"], torch.ones(2))


def test_equal_shapes_travel_in_one_broadcast():
    connection = Connection()
    counts = [connection.pass_on(message({"x": torch.full((2, 4), n)}))[1] for n in range(4)]
    assert counts == [4, 1, 1, 1], "header, structure, header, payload; then everything at once"


def test_changing_shapes_travel_without_the_structure():
    connection = Connection()
    sizes = [4, 4, 9, 2, 2]
    counts = []
    for size in sizes:
        arrived, count = connection.pass_on(message({"x": torch.arange(2 * size).view(2, size)}))
        counts.append(count)
        assert arrived.batch["x"].tolist() == torch.arange(2 * size).view(2, size).tolist()
    assert counts == [4, 1, 2, 1, 1]


def test_large_payloads_travel_by_themselves(monkeypatch):
    monkeypatch.setattr(broadcast, "LARGEST_SHARED_PAYLOAD", 64)
    connection = Connection()
    counts = [connection.pass_on(message({"x": torch.zeros(2, 64)}))[1] for _ in range(3)]
    assert counts == [4, 2, 2]


def test_what_is_equal_but_of_another_type_is_sent_again():
    connection = Connection()
    for value in (1, True, 1.0, "1"):
        got = connection.pass_on(message({"x": torch.zeros(2), "value": value}))[0].batch["value"]
        assert type(got) is type(value) and got == value


def test_received_batches_do_not_share_memory():
    connection = Connection()
    batches = [connection.pass_on(message(torch.full((2,), n)))[0].batch for n in range(4)]
    assert [batch.tolist() for batch in batches] == [[n, n] for n in range(4)]


def test_an_empty_stream_ends_at_once(connection):
    connection.sender.finish()
    assert connection.receive() is None


def test_a_failure_reaches_the_receivers(connection):
    connection.sender.fail(KeyError("row 3"))
    with pytest.raises(RuntimeError, match="KeyError.*row 3"):
        connection.receive()
    assert connection.pass_on(message(torch.zeros(2)))[0].batch.tolist() == [0, 0], "the connection is usable after it"


def test_what_cannot_be_sent_is_reported_on_both_sides():
    connection = Connection()
    with pytest.raises(Exception, match=r"(?i)sparse|layout|contiguous"):
        connection.sender.send(message(torch.eye(2).to_sparse()))
    with pytest.raises(RuntimeError, match="could not read its next batch"):
        connection.receive()


def test_processes_that_are_not_in_step_are_told():
    connection = Connection()
    connection.pass_on(message(torch.zeros(2)))
    connection.receiver.sequence += 1
    with pytest.raises(RuntimeError, match="not in step"):
        connection.pass_on(message(torch.zeros(2)))


# -- cutting and joining batches ----------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and all(map(equal, first, second))
    return first == second


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
    assert equal(whole, batch_of(0, 7))
    assert broadcast.batch_length(whole) == 7
    assert equal(broadcast.take(whole, 2, 5), batch_of(2, 5))


def test_padding_repeats_the_head():
    padded = broadcast.padded(batch_of(5, 7), 2, batch_of(0, 2), 7)
    assert padded["ids"].tolist() == [5, 6, 0, 1, 0, 1, 0]
    assert padded["text"] == ["s5", "s6", "s0", "s1", "s0", "s1", "s0"]


def test_length_is_that_of_the_first_leaf_with_samples():
    assert broadcast.batch_length({"scale": torch.tensor(1.0), "x": [torch.zeros(3, 2)]}) == 3
    assert broadcast.batch_length(["a", "b"]) == 2
    assert broadcast.batch_length({"note": "n"}) is None and broadcast.batch_length(torch.tensor(1)) is None


def test_batches_that_differ_are_refused():
    with pytest.raises(ValueError, match="cannot be joined"):
        broadcast.join([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(ValueError, match="cannot be joined"):
        broadcast.join([[torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]])


def test_without_torch_distributed_bytes_travel_as_objects():
    """As under torch_xla, whose communicator has no process group."""
    sent = deque()

    class Communicator:
        group = None

        def __init__(self, sends):
            self.sends = sends

        def broadcast_object_list(self, values, source):
            if self.sends:
                sent.append(pickle.dumps(values))
            else:
                values[:] = pickle.loads(sent.popleft())

    sender, receiver = (
        BatchBroadcast(broadcast.Transport(Communicator(sends)), 2, torch.device("cpu")) for sends in (True, False)
    )
    for number in range(3):
        sender.send(message({"x": torch.full((2, 3), number), "text": ["a", "b"]}))
        got = receiver.receive().batch
        assert got["x"].tolist() == [[number] * 3] * 2 and got["text"] == ["a", "b"]
