"""Modules made on the meta device."""

import pytest
import torch
from torch import nn

from accelerate.big_modeling import init_empty_weights, init_on_device


def _devices(module):
    return {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]}


def test_parameters_take_no_memory_and_buffers_are_real():
    with init_empty_weights():
        norm = nn.BatchNorm1d(3)
        loose = torch.ones(2)
    assert norm.weight.device.type == "meta" and norm.running_mean.device.type == "cpu"
    assert loose.device.type == "cpu"
    assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_buffers_on_request_and_by_environment(monkeypatch):
    with init_empty_weights(include_buffers=True):
        assert _devices(nn.BatchNorm1d(3)) == {"meta"}
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with init_empty_weights():
        assert _devices(nn.BatchNorm1d(3)) == {"meta"}
    with init_empty_weights(include_buffers=False):
        assert _devices(nn.BatchNorm1d(3)) == {"meta", "cpu"}


def test_works_as_a_decorator_more_than_once():
    @init_on_device("meta")
    def build():
        return nn.Linear(1, 1)

    assert _devices(build()) == _devices(build()) == {"meta"}


def test_ties_classes_and_attributes_survive():
    class Special(nn.Parameter):
        pass

    with init_empty_weights():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        model.own = Special(torch.ones(1), requires_grad=False)
        model.register_parameter("nothing", None)
    assert model[1].weight is model[0].weight
    assert type(model.own) is Special and not model.own.requires_grad


def test_nesting_and_errors_restore_torch():
    register = nn.Module.register_parameter
    with pytest.raises(KeyError), init_empty_weights():
        with init_on_device("cpu"):
            assert _devices(nn.Linear(1, 1)) == {"cpu"}
        assert _devices(nn.Linear(1, 1)) == {"meta"}
        raise KeyError
    assert nn.Module.register_parameter is register
