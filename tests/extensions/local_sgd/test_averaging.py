"""Local SGD: when weights are averaged, and where it is refused."""

import contextlib
import types

import pytest
import torch
from torch import nn

from accelerate.extensions.local_sgd import averaging as local_sgd
from accelerate.extensions.local_sgd.averaging import LocalSGD
from cases import cases


class Communicator:
    """Two ranks, of which the other one holds weights of zero."""

    def __init__(self):
        self.calls = 0

    def all_reduce(self, tensor, op="sum"):
        assert op == "mean"
        self.calls += 1
        return tensor / 2


@pytest.fixture
def communicator(monkeypatch):
    communicator = Communicator()
    monkeypatch.setattr(local_sgd.comm, "for_type", lambda kind: communicator)
    return communicator


@pytest.fixture
def make(monkeypatch):
    def make(num_processes=2, strategy="ddp"):
        held = []

        @contextlib.contextmanager
        def no_sync(model):
            held.append("held")
            yield
            held.append("released")

        monkeypatch.setattr(local_sgd, "resolve", lambda state: types.SimpleNamespace(name=strategy))
        return types.SimpleNamespace(
            num_processes=num_processes, state=None, distributed_type="MULTI_CPU", no_sync=no_sync, held=held
        )

    return make


def test_after_an_error_nobody_averages(make, communicator):
    accelerator = make()
    with pytest.raises(ValueError, match="mine"), LocalSGD(accelerator, nn.Linear(1, 1), 4):
        raise ValueError("mine")
    assert communicator.calls == 0 and accelerator.held == ["held", "released"]


@cases(
    "strategy, steps, error, text",
    ("ddp", 0, ValueError, "local_sgd_steps=0"),
    ("ddp", None, ValueError, "local_sgd_steps=None"),
    ("fsdp2", 4, NotImplementedError, "'fsdp2'"),
)
def test_what_is_refused_may_be_switched_off(make, strategy, steps, error, text):
    with pytest.raises(error, match=text):
        LocalSGD(make(strategy=strategy), nn.Linear(1, 1), steps)
    with LocalSGD(make(strategy=strategy), nn.Linear(1, 1), steps, enabled=False) as sgd:
        sgd.step()


def test_weights_are_averaged_with_one_collective_a_dtype(make, communicator):
    tensors = [
        torch.full((2,), 8.0),
        torch.full((1, 1), 8.0),
        torch.full((1,), 8.0, dtype=torch.float64),
        torch.full((1,), 8j),
    ]
    model = nn.ParameterList([*map(nn.Parameter, tensors), nn.Parameter(torch.ones(1).long(), requires_grad=False)])
    accelerator = make()
    with LocalSGD(accelerator, model, local_sgd_steps=2) as sgd:
        sgd.step()
        assert communicator.calls == 0
        sgd.step()
        assert communicator.calls == 3 and model[0].tolist() == [4, 4]
    assert [parameter.tolist() for parameter in model] == [[2, 2], [[2]], [2], [2j], [1]]
    assert accelerator.held == ["held", "released"]
