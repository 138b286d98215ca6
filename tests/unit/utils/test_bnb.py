"""bitsandbytes models, with a stand-in for the library."""

import logging
import sys
import types

import pytest
import torch
from torch import nn

from accelerate.config.bnb import BnbQuantizationConfig
from accelerate.utils import bnb


@pytest.fixture
def library(monkeypatch):
    """A bitsandbytes whose layers record their options and stay plain linear layers."""

    class Linear8bitLt(nn.Linear):
        def __init__(self, inputs, outputs, bias, **options):
            super().__init__(inputs, outputs, bias)
            self.options = options

    class Linear4bit(Linear8bitLt):
        pass

    fake = types.ModuleType("bitsandbytes")
    fake.nn = types.SimpleNamespace(Linear8bitLt=Linear8bitLt, Linear4bit=Linear4bit)
    monkeypatch.setitem(sys.modules, "bitsandbytes", fake)
    monkeypatch.setattr(bnb, "is_8bit_bnb_available", lambda: True)
    monkeypatch.setattr(bnb, "is_4bit_bnb_available", lambda: True)
    return fake


def _model():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU()), nn.Linear(2, 3))


def _config(bits=8, **options):
    return BnbQuantizationConfig(**{f"load_in_{bits}bit": True, "torch_dtype": torch.float16, **options})


def test_linear_layers_are_replaced_with_their_weights(library):
    model = _model()
    weight = model[0].weight
    assert bnb.replace_with_bnb_layers(model, _config(), modules_to_not_convert=["2"]) is model
    assert isinstance(model[0], library.nn.Linear8bitLt) and isinstance(model[1][0], library.nn.Linear8bitLt)
    assert type(model[2]) is nn.Linear
    assert model[0].options == {"has_fp16_weights": False, "threshold": 6.0}
    assert torch.equal(model[0].weight, weight) and not model[0].weight.requires_grad and model[1][0].bias is None


def test_four_bit_layers_get_their_options(library):
    model = bnb.replace_with_bnb_layers(_model(), _config(4, bnb_4bit_quant_type="nf4"))
    assert model[0].options["quant_type"] == "nf4" and bnb.has_4bit_bnb_layers(model)
    assert not bnb.has_4bit_bnb_layers(_model())


def test_a_model_without_linear_layers_says_so(library, caplog):
    with caplog.at_level(logging.WARNING):
        bnb.replace_with_bnb_layers(nn.Sequential(nn.ReLU()), _config())
    assert "no linear layer" in caplog.text


def test_output_and_tied_layers_keep_their_precision():
    assert bnb.get_keys_to_not_convert(_model()) == ["2"]
    tied = nn.ModuleDict({"emb": nn.Embedding(3, 2), "body": nn.Linear(2, 2), "head": nn.Linear(2, 3, bias=False)})
    tied["head"].weight = tied["emb"].weight
    assert bnb.get_keys_to_not_convert(tied) == ["emb", "head"]
    body = _model()
    body.base_model_prefix = "model"
    assert bnb.get_keys_to_not_convert(body) == []


def test_maps_are_computed_for_the_quantised_size():
    budget = {0: 150, "cpu": 1000}
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    plain = _config(skip_modules=[], keep_in_fp32_modules=[])
    kept = _config(skip_modules=["0"], keep_in_fp32_modules=["1"])
    assert bnb.get_quantized_model_device_map(model, plain, "sequential", max_memory=budget) == {"": 0}
    assert bnb.get_quantized_model_device_map(model, kept, "sequential", max_memory=budget) == {"": "cpu"}
    with pytest.raises(ValueError, match="'foo'"):
        bnb.get_quantized_model_device_map(model, plain, "foo")


def test_four_bit_layers_cannot_leave_the_accelerator():
    with pytest.raises(ValueError, match="4-bit"):
        bnb.get_quantized_model_device_map(_model(), _config(4, skip_modules=["1"]), {"0": "cpu", "1": "cpu", "2": 0})
    allowed = {"0": 0, "1": "cpu", "2": 0}
    assert bnb.get_quantized_model_device_map(_model(), _config(4, skip_modules=["1"]), allowed) == allowed


def test_loading_asks_for_the_library_and_the_weights(library, monkeypatch):
    with pytest.raises(RuntimeError, match="weights_location"):
        bnb.load_and_quantize_model(_model().to("meta"), _config())
    monkeypatch.setattr(bnb, "is_8bit_bnb_available", lambda: False)
    with pytest.raises(ImportError, match="bitsandbytes"):
        bnb.load_and_quantize_model(_model(), _config())


def test_loading_puts_weights_into_the_replaced_layers(library, tmp_path):
    source = _model()
    torch.save(source.state_dict(), tmp_path / "m.bin")
    places = {"0": "cpu", "1": "cpu", "2": "cpu"}
    config = _config(4, skip_modules=list(places))
    model = bnb.load_and_quantize_model(_model().to("meta"), config, tmp_path / "m.bin", device_map=places)
    assert model.is_loaded_in_4bit and not model.is_loaded_in_8bit and model.hf_device_map == places
    assert torch.equal(model[2].weight, source[2].weight.half())
    assert bnb.get_parameter_device(model) == torch.device("cpu")
