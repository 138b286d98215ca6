"""One tensor onto a device, and modules for the length of a block."""

import pytest
import torch
from torch import nn

from accelerate.extensions.big_models.placement import align_module_device, set_module_tensor_to_device
from accelerate.modules.offloaded import has_offloaded_params


def test_a_value_takes_the_old_dtype_unless_one_is_given():
    layer = nn.Linear(3, 4)
    half = torch.ones(4, 3, dtype=torch.float16)
    set_module_tensor_to_device(layer, "weight", "cpu", value=half)
    assert layer.weight.dtype is torch.float32
    set_module_tensor_to_device(layer, "weight", "cpu", value=half, dtype="bfloat16")
    assert layer.weight.dtype is torch.bfloat16
    set_module_tensor_to_device(layer, "bias", "cpu", dtype="torch.float16")
    assert layer.bias.dtype is torch.float16
    with pytest.raises(ValueError, match="dtype='fp16'"):
        set_module_tensor_to_device(layer, "weight", "cpu", dtype="fp16")
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(4, 3, dtype=torch.int8), dtype=torch.float16)
    assert layer.weight.dtype is torch.int8 and not layer.weight.requires_grad


def test_a_value_that_needs_no_change_is_not_copied():
    layer, value = nn.Linear(3, 4).to("meta"), torch.ones(4, 3)
    set_module_tensor_to_device(layer, "weight", "cpu", value=value)
    assert layer.weight.data_ptr() == value.data_ptr() and layer.weight.requires_grad and layer.weight.is_leaf
    norm, mean = nn.BatchNorm1d(3), torch.ones(3)
    set_module_tensor_to_device(norm, "running_mean", "cpu", value=mean)
    assert norm._buffers["running_mean"].data_ptr() == mean.data_ptr()
    assert not isinstance(norm.running_mean, nn.Parameter)


@pytest.mark.parametrize("into_plain", [False, True])
def test_tensor_subclasses_stay_what_they_are(into_plain):
    quantization = pytest.importorskip("torchao.quantization")
    source, x = nn.Linear(32, 32, bias=False), torch.ones(1, 32)
    quantization.quantize_(source, quantization.Int8WeightOnlyConfig())
    expected, value = source(x), source.weight
    layer = nn.Linear(32, 32, bias=False, device="meta") if into_plain else source
    if not into_plain:
        set_module_tensor_to_device(layer, "weight", "meta")
        assert type(layer.weight) is type(value) and layer.weight.device.type == "meta"
    set_module_tensor_to_device(layer, "weight", "cpu", value=value)
    assert type(layer.weight) is type(value) and isinstance(layer.weight, nn.Parameter)
    assert torch.equal(layer(x), expected)


def test_class_attributes_and_requires_grad_carry_over():
    class Special(nn.Parameter):
        pass

    layer = nn.Linear(3, 4)
    layer.weight = Special(torch.ones(4, 3), requires_grad=False)
    layer.weight.tag = "kept"
    set_module_tensor_to_device(layer, "weight", "meta")
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.zeros(4, 3))
    assert type(layer.weight) is Special
    assert layer.weight.tag == "kept" and not layer.weight.requires_grad


def test_align_on_a_plain_module_restores_the_very_tensors():
    norm = nn.BatchNorm1d(2)
    weight = norm.weight
    with align_module_device(norm, "meta"):
        assert norm.weight.is_meta and not norm.running_mean.is_meta
    assert norm.weight is weight
    with pytest.raises(KeyError), align_module_device(norm, "meta"):
        raise KeyError
    assert norm.weight is weight
    with align_module_device(norm, "cpu"), torch.no_grad():
        norm.weight.fill_(3)
    assert norm.weight is weight and (weight == 3).all()
    assert not has_offloaded_params(norm)


def test_names_reach_into_submodules_and_mistakes_are_named():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2, bias=False)), nn.ParameterList([torch.ones(2)]))
    model.register_buffer("mask", None)
    set_module_tensor_to_device(model, "0.0.weight", "meta")
    set_module_tensor_to_device(model, "1.0", "cpu", value=torch.zeros(2))
    assert model[0][0].weight.is_meta and not model[1][0].any()
    for name, value, error, text in (
        ("0.1.weight", None, AttributeError, "1"),
        ("0.0.weights", None, ValueError, "'0.0.weights' is no parameter or buffer of Linear"),
        ("0", None, ValueError, "'0'"),
        ("0.0.bias", torch.ones(2), ValueError, "'0.0.bias' is registered as None"),
        ("mask", torch.ones(2), ValueError, "'mask' is registered as None"),
        ("0.0.weight", torch.ones(1), ValueError, "shape"),
    ):
        with pytest.raises(error, match=text):
            set_module_tensor_to_device(model, name, "cpu", value=value)
