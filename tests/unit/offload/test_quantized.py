"""Weights that are quantised to 8 bits on their way to an offload folder."""

import torch
from torch import nn

from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.offload.loading import load_offloaded_weights, quantize_and_offload_8bit
from accelerate.utils.offload import OffloadedWeightsLoader


def test_a_quantised_weight_travels_with_its_scales(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    weight, scales, index = torch.ones(2, 2, dtype=torch.int8), torch.full((2,), 3.0), {}
    quantize_and_offload_8bit(model, weight, "0.weight", torch.float16, tmp_path, index, scales)
    assert set(index) == {"0.weight", "0.SCB"} and index["0.weight"]["dtype"] == "int8"
    assert model[0].weight.is_meta and model[0].weight.dtype is torch.int8
    load_offloaded_weights(model, index, tmp_path)
    assert model[0].weight.dtype is torch.int8 and torch.equal(model[0].weight.SCB, scales)


def test_other_tensors_are_written_in_the_dtype_wanted(tmp_path):
    model, index = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), {}
    quantize_and_offload_8bit(model, torch.ones(2), "0.bias", torch.float16, tmp_path, index, None)
    quantize_and_offload_8bit(model, torch.ones(2).half(), "1.running_mean", None, tmp_path, index, None)
    quantize_and_offload_8bit(model, torch.tensor(3), "1.num_batches_tracked", torch.float16, tmp_path, index, None)
    dtypes = {name: entry["dtype"] for name, entry in index.items()}
    assert dtypes == {"0.bias": "float16", "1.running_mean": "float32", "1.num_batches_tracked": "int64"}
    assert model[0].bias.is_meta and model[0].bias.dtype is torch.float16 and model[0].bias.requires_grad
    assert model[1].running_mean.is_meta and model[1].num_batches_tracked.is_meta


def test_hooks_hand_the_scales_to_the_weight(tmp_path):
    state = {"weight": torch.ones(2, 2, dtype=torch.int8), "SCB": torch.full((2,), 3.0)}
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    hook = AlignDevicesHook("cpu", offload=True, weights_map=OffloadedWeightsLoader(state_dict=state))
    add_hook_to_module(layer, hook)
    hook.pre_forward(layer)
    assert torch.equal(layer.weight, state["weight"]) and torch.equal(layer.weight.SCB, state["SCB"])
