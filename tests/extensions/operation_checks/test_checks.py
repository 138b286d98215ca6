"""What the ranks compare; tests/distributed/scripts/check_operations.py has real ones that disagree."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from accelerate import comm
from accelerate.comm import operations as ops
from accelerate.comm.base import Communicator, DistributedOperationException
from accelerate.extensions.operation_checks import calls
from accelerate.extensions.operation_checks.calls import Call, CallChecker
from accelerate.process import PartialState
from unit.comm.test_operations import Two


def call(length, operation="gather"):
    return Call(operation, None, "\0", "fake", ((torch.float32, torch.Size([length])),))


def test_calls_that_repeat_are_expected():
    checker = CallChecker(0)
    assert checker.expected() is None
    for _ in range(2):
        for length in (3, 5, 1 << 20):
            checker.remember(call(length))
    assert checker.expected() == call(3)
    checker.remember(call(3))
    assert checker.expected() == call(5)
    checker.remember(call(5))
    assert checker.expected() is None, "a large one is compared first"
    for length in range(100):
        checker.remember(call(length))
    assert checker.expected() is None


def test_nothing_is_kept_for_each_shape(process_group):
    def tensors():
        gc.collect()
        found = (item for item in gc.get_objects() if type(item) is torch.Tensor and item.layout is torch.strided)
        return sum(item.nbytes for item in found)

    communicator, before = comm.for_type("MULTI_CPU"), tensors()
    for length in range(900):
        communicator.all_gather(torch.ones(1000 + length))
        communicator.all_reduce(torch.ones(1000 + length))
    assert tensors() - before < 1 << 20


class Flags:
    """Two flags on a device that a CPU does not have."""

    device, is_cpu = SimpleNamespace(type="fake"), False

    def __init__(self, *values):
        self.to = lambda device, non_blocking: torch.tensor(values)
        self.__class__ = type("Flags", (Flags,), {"__getitem__": lambda _, place: values[place]})


@pytest.fixture
def checker(monkeypatch):
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "fake", SimpleNamespace(Event=lambda: event), raising=False)
    return CallChecker(1)


def test_ranks_that_did_what_was_expected_learn_before_the_next_call_that_one_did_not(checker):
    assert checker.is_valid(call(2), call(2), Flags(0, 1))
    checker.flush()
    assert checker.is_valid(call(2), call(2), Flags(1, 1))
    with pytest.raises(DistributedOperationException, match=r"not all processes.*process 1.*gather` of float32\[2\]"):
        checker.expected()
    checker.flush()


def test_a_rank_that_does_something_else_raises_at_once_unless_all_do(checker):
    assert not checker.is_valid(call(3), call(2), Flags(1, 0))
    with pytest.raises(
        DistributedOperationException, match=r"process 1 called `gather` of float32\[3\].*float32\[2\]"
    ):
        checker.is_valid(call(3), call(2), Flags(1, 1))


def test_ranks_whose_objects_have_grown_are_waited_for(checker):
    known, grown = (Call("gather_object", None, "", "fake", ((torch.uint8, torch.Size([n])),)) for n in (64, 0))
    assert not checker.is_valid(grown, known, Flags(1, 1)) and not checker.is_valid(known, known, Flags(1, 1))


def test_an_error_lists_few_of_many_ranks():
    said = [("gather", "float32[2]")] * 1024
    said[100:200] = [("gather", "float32[3]")] * 100
    lines = str(calls.disagreement(said)).splitlines()
    assert len(lines) < 30 and "  - Process 0: float32[2]" in lines and "  - Process 100: float32[3]" in lines
    assert "100, 101" in lines[0] and "and 84 more" in lines[0]


def test_what_is_too_long_for_a_message_has_a_checksum():
    long = [Call("gather", None, "\0" * 100, "cpu", ((torch.float32, torch.Size([n])),) * 100) for n in (1, 2)]
    texts = [call.in_words() for call in long]
    assert all(len(text) < 600 and "100 tensors" in text for text in texts) and texts[0] != texts[1]


class Thread(Communicator):
    """A rank of two, in a thread."""

    world_size = 2

    def __init__(self, rank, said, barrier):
        self.rank, self.said, self.barrier = rank, said, barrier

    def gather_object(self, obj):
        self.said[self.rank] = obj
        self.barrier.wait(30)
        result = [*self.said]
        self.barrier.wait(30)
        return result


def errors_of_two(operation, *data):
    """Return the errors of two ranks that pass something to an operation."""
    shared = [None, None], threading.Barrier(2)

    def run(rank):
        try:
            operation(Thread(rank, *shared), data[rank])
        except DistributedOperationException as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(run, range(2)))


def test_debug_mode_compares_first(monkeypatch):
    PartialState(cpu=True).debug = True
    monkeypatch.setattr(ops.comm, "current", Two)
    seen = []
    monkeypatch.setattr(calls, "require_same", lambda communicator, call: seen.append(call.operation))
    ops.gather(torch.ones(1)), ops.reduce(torch.ones(1)), ops.broadcast(torch.ones(1))
    ops.pad_across_processes(torch.ones(1))
    names = [name.rpartition(".")[2] for name in seen]
    assert names == ["gather", "reduce", "broadcast", "pad_across_processes"]


def test_debug_mode_names_ranks_shapes_and_devices():
    PartialState(cpu=True).debug = True
    a, b = torch.ones(2), torch.ones(3)
    for text in errors_of_two(ops.gather_with, {"a": a}, {"a": b}):
        for fragment in ("operations.gather", "Process 0: {'a': float32[2]", "Process 1: {'a': float32[3]"):
            assert fragment in text
    for first, second in (([a], [a, a]), (a, None), (a, a.to("meta"))):
        assert all(errors_of_two(ops.gather_with, first, second))
    assert errors_of_two(ops.pad_with, [a], [b]) == [None, None], "padding repairs it"
    assert all("[?, ?]" in text for text in errors_of_two(ops.pad_with, [a], [a[None]]))
    assert all("meta" in text and "'cpu'" in text for text in errors_of_two(ops.gather_with, *[a.to("meta")] * 2))
