import pytest
import torch
from torch import nn

from accelerate.comm import operations as ops
from accelerate.comm.base import Communicator
from accelerate.process import PartialState
from accelerate.runtime import storage


class Two(Communicator):
    """Two ranks, of which the other one passes the same."""

    world_size = 2

    def _exchange(self, operation, argument, structure, tensors):
        if argument is None:
            return [torch.cat([t, t]) for t in tensors]
        return [t + (argument if operation == "broadcast" else 0 if argument == "max" else t) for t in tensors]


@pytest.fixture
def two(monkeypatch):
    PartialState(cpu=True)
    monkeypatch.setattr(ops.comm, "current", Two)


def test_what_cannot_be_combined():
    for operation in (ops.reduce, ops.pad_across_processes):
        with pytest.raises(TypeError, match="int"):
            operation({"a": 3})
    with pytest.raises(ValueError, match="'min'"):
        ops.reduce(torch.ones(1), "min")
    with pytest.warns(UserWarning, match="XLA"):
        ops.reduce(torch.ones(1), scale=2.0)


def test_broadcast_fills_what_it_is_given(two):
    weight, columns = nn.Parameter(torch.zeros(2)), torch.zeros(2, 3)
    with torch.inference_mode():
        frozen = torch.zeros(1)
    product = weight * 2
    data = {"a": weight, "b": [columns[:, 1], (frozen,)], "c": product}
    result = ops.broadcast(data, from_process=1)
    assert result["a"] is weight and result["b"][1][0] is frozen and result["c"] is product
    assert weight.tolist() == [1, 1] and frozen.item() == 1 and columns.tolist() == [[0, 1, 0], [0, 1, 0]]
    product.sum().backward()
    assert weight.grad.tolist() == [2, 2]
    one = torch.zeros(1)
    assert ops.broadcast(one.expand(3), from_process=1).tolist() == [1, 1, 1] and one.item() == 0


def test_debug_mode_without_its_extension_raises(two, monkeypatch):
    storage.process.current["debug"] = True
    monkeypatch.setattr(ops.comm, "operation_checks", lambda: None)
    with pytest.raises(ValueError, match="ACCELERATE_DEBUG_MODE needs an extension with `operation_checks`"):
        ops.gather(torch.ones(1))
