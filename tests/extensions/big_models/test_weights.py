"""The state dicts of offloaded models."""

import logging

import torch
from torch import nn

from accelerate.big_modeling import init_empty_weights
from accelerate.extensions.big_models.weights import get_state_dict_offloaded_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module


def test_tensors_without_data_are_named(caplog):
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    with caplog.at_level(logging.WARNING):
        get_state_dict_offloaded_model(model)
    assert "0.bias, 0.weight, 1.weight" in caplog.text
    # A hook that does not have the weight does not help; one that does, does.
    add_hook_to_module(model[1], AlignDevicesHook("cpu", offload=True, weights_map={"weight": torch.ones(4, 4)}))
    model[0]._hf_hook = AlignDevicesHook("cpu", offload=True, weights_map={"bias": torch.ones(4)})
    caplog.clear()
    get_state_dict_offloaded_model(model)
    assert caplog.messages[0].endswith("on the meta device: 0.weight")
