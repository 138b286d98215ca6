"""torch_xla's data parallelism, by calls of a stand-in that are recorded."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.config.enums import DistributedType
from accelerate.extensions.xla.strategy import XLA, ReduceBeforeStep
from accelerate.strategies import registry


@pytest.fixture
def xm(monkeypatch):
    """`torch_xla.core.xla_model` of a run in which the other replica has gradients of zeros."""
    calls = []

    def all_reduce(kind, gradients, scale):
        calls.append((kind, len(gradients)))
        for gradient in gradients:
            gradient.mul_(scale / 2)

    module = types.ModuleType("torch_xla.core.xla_model")
    module.all_reduce, module.calls = all_reduce, calls
    module.mark_step = lambda: calls.append("mark")
    module._fetch_gradients = lambda optimizer: [
        parameter.grad for group in optimizer.param_groups for parameter in group["params"]
    ]
    core = types.ModuleType("torch_xla.core")
    core.xla_model = module
    package = types.ModuleType("torch_xla")
    package.core = core
    for name, value in (("torch_xla", package), ("torch_xla.core", core), ("torch_xla.core.xla_model", module)):
        monkeypatch.setitem(sys.modules, name, value)
    return module


@pytest.mark.parametrize("by_value", [True, False])
def test_gradients_of_all_optimizers_are_averaged_once_before_they_are_clipped(xm, by_value):
    accelerator = Accelerator(cpu=True)
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    accelerator.prepare(*models, *optimizers)
    parameters = [model.weight for model in models]
    for parameter in parameters:
        parameter.grad = torch.tensor([[8.0, -2.0]])
    for _ in range(2):
        if by_value:
            XLA().clip_grad_value(accelerator, parameters, 2.5)
        else:
            assert XLA().clip_grad_norm(accelerator, parameters, 100.0, 2.0).item() == pytest.approx(34**0.5)
    assert xm.calls == [("sum", 1)] * 2
    expected = [[2.5, -1.0]] if by_value else [[4.0, -1.0]]
    assert [parameter.grad.tolist() for parameter in parameters] == [expected] * 2


def test_gradients_are_averaged_once_before_a_step_and_the_graph_ends_after_it(xm):
    accelerator = Accelerator(cpu=True)
    accelerator.extensions.add(ReduceBeforeStep(accelerator))
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for clips in (False, True):
        model.weight.grad = torch.tensor([[8.0, -2.0]])
        if clips:
            XLA().clip_grad_value(accelerator, model.parameters(), 100.0)
        optimizer.step()
    assert xm.calls == [("sum", 1), "mark"] * 2
    assert model.weight.tolist() == [[-8.0, 2.0]]


def test_a_state_finds_the_strategy():
    assert registry.resolve(SimpleNamespace(distributed_type=DistributedType.XLA)).name == "xla"
