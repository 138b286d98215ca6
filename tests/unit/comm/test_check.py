"""What the ranks compare; tests/distributed/scripts/check_operations.py has real ones that disagree."""

import gc
from types import SimpleNamespace

import pytest
import torch

from accelerate import comm
from accelerate.comm import check
from accelerate.comm.base import Communicator
from accelerate.comm.check import Call, CallChecker, DistributedOperationException


def call(length, operation="gather"):
    return Call(operation, None, None, "fake", ((torch.float32, torch.Size([length])),))


# -- what comes next


def test_calls_that_repeat_are_expected():
    checker = CallChecker(0, None, None)
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


# -- flags that are not waited for, on a device with streams


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
    return CallChecker(1, None, None)


def test_ranks_that_did_what_was_expected_learn_before_the_next_call_that_one_did_not(checker):
    assert checker.is_valid(call(2), call(2), Flags(0, 1))
    checker.settle()
    assert checker.is_valid(call(2), call(2), Flags(1, 1))
    with pytest.raises(DistributedOperationException, match=r"not all processes.*process 1.*gather` of float32\[2\]"):
        checker.expected()
    checker.settle()


def test_a_rank_that_does_something_else_raises_at_once_unless_all_do(checker):
    assert not checker.is_valid(call(3), call(2), Flags(1, 0))
    with pytest.raises(
        DistributedOperationException, match=r"process 1 called `gather` of float32\[3\].*float32\[2\]"
    ):
        checker.is_valid(call(3), call(2), Flags(1, 1))


# -- errors


def test_an_error_lists_few_of_many_ranks():
    passed = ["float32[2]"] * 1024
    passed[100:200] = ["float32[3]"] * 100
    lines = str(check.disagreement("gather", passed)).splitlines()
    assert len(lines) < 30 and "  - Process 0: float32[2]" in lines and "  - Process 100: float32[3]" in lines
    assert "100, 101" in lines[0] and "and 84 more" in lines[0]


# -- debug mode


class Told(Communicator):
    """A communicator whose other rank passes something else."""

    world_size = 2

    def __init__(self, other):
        self.other = other

    def gather_object(self, obj):
        return [obj, check_entry(obj[0], self.other)]


def check_entry(operation, data):
    pads = operation.endswith("pad_across_processes")
    return operation, check.describe(data, sizes=not pads), check.describe(data), []


def test_debug_mode_names_ranks_and_shapes():
    with pytest.raises(DistributedOperationException) as caught:
        check.verify(Told({"a": torch.ones(3)}), "accelerate.utils.operations.gather", {"a": torch.ones(2)})
    text = str(caught.value)
    for fragment in ("operations.gather", "Process 0: {'a': float32[2]", "Process 1: {'a': float32[3]"):
        assert fragment in text
    operation = "accelerate.utils.operations.pad_across_processes"
    check.verify(Told([torch.ones(3)]), operation, [torch.ones(2)])  # padding repairs it
    with pytest.raises(DistributedOperationException):
        check.verify(Told([torch.ones(3, 1)]), operation, [torch.ones(2)])
    with pytest.raises(DistributedOperationException, match=r"'cuda'.*process 0: cpu"):
        check.verify(Told(torch.ones(1)), "gather", torch.ones(1), torch.device("cuda"))
