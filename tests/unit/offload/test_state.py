"""State dicts of offloaded models."""

import logging

import torch
from torch import nn

from accelerate.big_modeling import init_empty_weights
from accelerate.hooks import attach_align_device_hook
from accelerate.offload.weights import (
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    tensors_without_data,
)


def _model():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.scale = nn.Parameter(torch.ones(1))
    return model


def test_the_whole_state_dict_comes_back_without_moving_the_model():
    model = _model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True, offload_buffers=True)
    gathered = get_state_dict_offloaded_model(model)
    assert list(gathered) == list(state) and gathered._metadata[""] == {"version": 1}
    assert all(torch.equal(gathered[name], state[name]) and not gathered[name].requires_grad for name in state)
    assert model[0].weight.device.type == "meta"
    assert tensors_without_data(model) == []


def test_blocks_loaded_as_a_whole_are_read_too():
    model = _model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True, preload_module_classes=["Sequential"])
    gathered = get_state_dict_offloaded_model(model)
    assert all(torch.equal(gathered[name], state[name]) for name in state)


def test_one_module_fills_the_names_that_are_asked_for():
    model = _model()
    weight = model[0].weight.detach().clone()
    attach_align_device_hook(model, "cpu", offload=True)
    assert torch.equal(get_state_dict_from_offload(model[0], "0.weight", {"0.weight": None})["0.weight"], weight)
    assert get_state_dict_from_offload(model[0], "0.weight", {}) == {}
    on_meta = get_state_dict_from_offload(model[0], "0.weight", {"0.weight": None}, device_to_put_offload="meta")
    assert on_meta["0.weight"].device.type == "meta"


def test_weights_without_data_are_named(caplog):
    with init_empty_weights():
        model = nn.Linear(2, 2)
    assert tensors_without_data(model) == ["bias", "weight"]
    with caplog.at_level(logging.WARNING):
        get_state_dict_offloaded_model(model)
    assert "bias, weight" in caplog.text
