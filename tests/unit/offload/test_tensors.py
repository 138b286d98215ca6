"""Names of parameters and buffers."""

import torch
from torch import nn

from accelerate.offload.tensors import get_non_persistent_buffers, named_module_tensors


def _model():
    inner = nn.BatchNorm1d(2)
    inner.register_buffer("mask", torch.ones(1), persistent=False)
    return nn.Sequential(nn.Linear(2, 2), inner)


def test_order_is_parameters_then_buffers_and_recursion_is_asked_for():
    model = _model()
    assert [name for name, _ in named_module_tensors(model)] == []
    names = [name for name, _ in named_module_tensors(model, recurse=True)]
    assert names[:4] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert "1.mask" in names and "1.running_mean" in names
    assert "1.running_mean" not in dict(named_module_tensors(model, include_buffers=False, recurse=True))


def test_asking_for_non_persistent_buffers_changes_nothing():
    model = _model()
    before = [set(module._non_persistent_buffers_set) for module in model.modules()]
    assert get_non_persistent_buffers(model) == set()
    assert get_non_persistent_buffers(model, recurse=True) == {"mask"}
    found = get_non_persistent_buffers(model, recurse=True, fqns=True)
    assert found == {"1.mask"}
    found.add("other")
    assert [set(module._non_persistent_buffers_set) for module in model.modules()] == before
