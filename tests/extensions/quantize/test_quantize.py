"""bitsandbytes models: which layers, which maps and which errors with a stand-in for the library; the rest with the real one."""

import json
import logging
import sys
import types

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import init_empty_weights
from accelerate.extensions.quantize import quantize as bnb
from accelerate.extensions.quantize.config import BnbQuantizationConfig
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils.modeling import get_state_dict_offloaded_model
from cases import cases


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


def test_linear_layers_are_replaced_with_their_weights_mode_and_options(library, caplog):
    model = _model()
    model[1].eval()
    weight = model[0].weight
    assert bnb.replace_with_bnb_layers(model, _config(), modules_to_not_convert=["2"]) is model
    assert isinstance(model[0], library.nn.Linear8bitLt) and isinstance(model[1][0], library.nn.Linear8bitLt)
    assert type(model[2]) is nn.Linear and model[0].training and not model[1][0].training
    assert model[0].options == {"has_fp16_weights": False, "threshold": 6.0}
    assert torch.equal(model[0].weight, weight) and not model[0].weight.requires_grad and model[1][0].bias is None
    model = bnb.replace_with_bnb_layers(_model(), _config(4, bnb_4bit_quant_type="nf4"))
    assert model[0].options["quant_type"] == "nf4" and bnb.has_4bit_bnb_layers(model)
    assert not bnb.has_4bit_bnb_layers(_model())
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


def test_layers_whose_weights_are_read_by_others_stay(library):
    encoder = nn.TransformerEncoderLayer(8, 2, 8)
    bnb.replace_with_bnb_layers(encoder, _config())
    assert isinstance(encoder.linear1, library.nn.Linear8bitLt)
    assert not isinstance(encoder.self_attn.out_proj, library.nn.Linear8bitLt)
    assert not encoder.activation_relu_or_gelu, "its fused kernel reads the weights itself"


def test_maps_are_computed_for_the_quantised_size_and_count_the_rest_with_what_it_takes():
    model = nn.Sequential(nn.Embedding(50, 2), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    config = _config(skip_modules=[], keep_in_fp32_modules=[])
    # fp16 embedding 200, weight 64, fp16 bias 16, weight 64
    fits = bnb.get_quantized_model_device_map(model, config, "sequential", max_memory={"cpu": 344})
    assert fits == {"": "cpu"}
    less = bnb.get_quantized_model_device_map(model, config, "sequential", max_memory={"cpu": 343, "disk": 999})
    assert less["2"] == "disk"
    budget = {0: 150, "cpu": 1000}
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    plain = _config(skip_modules=[], keep_in_fp32_modules=[])
    kept = _config(skip_modules=["0"], keep_in_fp32_modules=["1"])
    assert bnb.get_quantized_model_device_map(model, plain, "sequential", max_memory=budget) == {"": 0}
    assert bnb.get_quantized_model_device_map(model, kept, "sequential", max_memory=budget) == {"": "cpu"}
    with pytest.raises(ValueError, match="'foo'"):
        bnb.get_quantized_model_device_map(model, plain, "foo")


@pytest.mark.parametrize("bits", [4, 8])
def test_loading_asks_for_the_library(library, monkeypatch, bits):
    monkeypatch.setattr(bnb, f"is_{bits}bit_bnb_available", lambda: False)
    with pytest.raises(ImportError, match=f"load_in_{bits}bit.*pip install"):
        bnb.load_and_quantize_model(_model(), _config(bits))
    with pytest.raises(ValueError, match="bnb_quantization_config=None is no BnbQuantizationConfig"):
        bnb.load_and_quantize_model(_model(), None)


def test_loading_puts_weights_into_the_replaced_layers(library, tmp_path):
    source = _model()
    torch.save(source.state_dict(), tmp_path / "m.bin")
    places = {"0": "cpu", "1": "cpu", "2": "cpu"}
    config = _config(4, skip_modules=["2"])
    model = bnb.load_and_quantize_model(_model().to("meta"), config, tmp_path / "m.bin", device_map=places)
    assert model.is_loaded_in_4bit and not model.is_loaded_in_8bit and model.hf_device_map == places
    assert isinstance(model[0], library.nn.Linear4bit) and type(model[2]) is nn.Linear
    for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
        assert torch.equal(mine, theirs.half())
    assert bnb.get_parameter_device(model) == torch.device("cpu")


@cases(
    "options, error, text",
    ({"weights_location": None}, RuntimeError, "weights_location"),
    ({"device_map": "foo"}, ValueError, "'foo'"),
    ({"device_map": {"0": "cpu", "1": "cpu"}}, ValueError, "2.weight"),
    ({"device_map": {"0": "cpu", "1": "disk", "2": "cpu"}}, ValueError, "'1' to disk.*offload_folder"),
    ({"max_memory": {"cpu": 10, "disk": 999}, "device_map": "auto", "offload_folder": "o"}, ValueError, "to disk"),
)
def test_wrong_arguments_leave_the_model_as_it_was(library, options, error, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(_model().state_dict(), "m.bin")
    model, config = _model().to("meta"), _config(4, skip_modules=[])
    modules, tensors = list(model.named_modules()), dict(model.named_parameters())
    with pytest.raises(error, match=text):
        options = {"weights_location": "m.bin", "device_map": {"": "cpu"}, **options}
        bnb.load_and_quantize_model(model, config, **options)
    assert list(model.named_modules()) == modules
    assert all(tensors[name] is tensor for name, tensor in model.named_parameters())
    assert not hasattr(model, "is_loaded_in_4bit") and [path.name for path in tmp_path.iterdir()] == ["m.bin"]
    assert config == _config(4, skip_modules=[])


def test_a_checkpoint_that_lacks_weights_is_refused(library, tmp_path):
    state = _model().state_dict()
    del state["1.0.weight"]
    torch.save(state, tmp_path / "m.bin")
    with pytest.raises(ValueError, match=r"1\.0\.weight"):
        bnb.load_and_quantize_model(_model().to("meta"), _config(skip_modules=["2"]), tmp_path / "m.bin")


def test_a_shared_layer_stays_shared(library, tmp_path):
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared, nn.ReLU()), nn.Linear(2, 2))
    # A checkpoint in safetensors has it once.
    save_file({name: t for name, t in model.state_dict().items() if name[0] != "1"}, tmp_path / "m.safetensors")
    loaded = bnb.load_and_quantize_model(model.to("meta"), _config(skip_modules=["2"]), tmp_path / "m.safetensors")
    assert type(loaded[0][0]) is library.nn.Linear8bitLt and loaded[0][0] is loaded[1][0]


def test_names_without_effect_are_said(library, caplog):
    config = _config(skip_modules=["1.0", "nope"], keep_in_fp32_modules=["2.bias", "norm"])
    with caplog.at_level(logging.WARNING):
        bnb.load_and_quantize_model(_model(), config, device_map={"": "cpu"})
    warnings = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    words = [" ".join(warning.split()[:3]) for warning in warnings]
    assert words == ["skip_modules names ['nope']:", "keep_in_fp32_modules names ['norm']:"]


# With the real library; that a whole model is what it makes: tests/interop/test_bitsandbytes.py


class Net(nn.Module):
    """Embedding, linear layers of which one runs twice, a norm, a persistent buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(16, 128)
        self.body = nn.Sequential(nn.Linear(128, 192), nn.ReLU(), nn.Linear(192, 128))
        self.norm = nn.LayerNorm(128)
        self.twice = nn.Linear(128, 128, bias=False)
        self.odd = nn.Linear(128, 40)
        self.head = nn.Linear(40, 16, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids):
        x = self.norm(self.emb(ids) + self.body(self.emb(ids)))
        return self.head(self.odd(self.twice(self.twice(x)) * self.scale))


IDS = torch.arange(6).reshape(2, 3)
ALL_CPU = dict.fromkeys(["emb", "body", "norm", "twice", "odd", "head", "scale"], "cpu")
OPTIONS = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"},
}


@pytest.fixture
def checkpoint(tmp_path):
    pytest.importorskip("bitsandbytes")
    save_file(Net().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def _loaded(checkpoint, kind, device_map=None, **options):
    with init_empty_weights():
        model = Net()
    config = BnbQuantizationConfig(**OPTIONS[kind])
    return bnb.load_and_quantize_model(model, config, checkpoint, device_map=device_map, **options).eval()


CUTS = {
    "run twice": {"twice": "disk", "emb": "disk"},
    "most": dict.fromkeys(["emb", "body", "norm", "twice", "odd"], "disk"),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("empty", [True, False], ids=["from checkpoint", "in place"])
@torch.no_grad()
def test_offloaded_8_bit_models_give_the_same_bits(cut, empty, checkpoint, tmp_path):
    whole = _loaded(checkpoint, "int8")
    expected, state = whole(IDS), whole.state_dict()
    places = {name: device for name, device in {**ALL_CPU, **CUTS[cut]}.items() if device}
    if empty:
        model = _loaded(checkpoint, "int8", places, offload_folder=tmp_path / "o")
    else:
        config = BnbQuantizationConfig(load_in_8bit=True)
        model = bnb.load_and_quantize_model(Net(), config, device_map=places, offload_folder=tmp_path / "o").eval()
    assert model.hf_device_map == places
    offloaded = {name for name, tensor in model.named_parameters() if tensor.is_meta}
    assert offloaded == {name for name in dict(Net().named_parameters()) if _place_of(name, places) == "disk"}
    for _ in range(3):
        assert torch.equal(model(IDS), expected)
    found = get_state_dict_offloaded_model(model)
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    if not empty:
        remove_hook_from_submodules(model)
        assert not any(tensor.is_meta for tensor in model.parameters())
        assert torch.equal(model(IDS), expected)


def _place_of(name, places):
    return next(device for module, device in places.items() if f"{name}.".startswith(f"{module}."))


@torch.no_grad()
def test_with_4_bits_offloaded_modules_stay_unquantised(checkpoint, tmp_path):
    places = {**ALL_CPU, "body": "disk"}
    model = _loaded(checkpoint, "nf4", places, offload_folder=tmp_path / "o")
    assert type(model.body[0]) is nn.Linear and bnb.has_4bit_bnb_layers(model)
    expected = _loaded(checkpoint, "nf4")
    expected.body = Net().body.to(torch.float32).eval()
    assert torch.equal(model(IDS), expected(IDS))


@torch.no_grad()
def test_a_quantised_checkpoint_is_loaded_as_it_is(checkpoint, tmp_path):
    expected = _loaded(checkpoint, "int8")
    (tmp_path / "q").mkdir()
    state = {name: tensor.contiguous() for name, tensor in expected.state_dict().items()}
    first = {name: tensor for name, tensor in state.items() if not name.endswith("SCB")}
    # The scales are in another file than the weights.
    save_file(first, tmp_path / "q" / "1.safetensors")
    save_file({name: state[name] for name in state.keys() - first.keys()}, tmp_path / "q" / "2.safetensors")
    index = {name: f"{1 if name in first else 2}.safetensors" for name in state}
    (tmp_path / "q" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for places in (None, {**ALL_CPU, "twice": "disk"}):
        model = _loaded(tmp_path / "q", "int8", places, offload_folder=tmp_path / "o")
        assert torch.equal(model(IDS), expected(IDS))


def test_modules_kept_in_fp32_are(checkpoint):
    options = {"keep_in_fp32_modules": ["norm", "twice"], "skip_modules": []}
    config = BnbQuantizationConfig(load_in_8bit=True, **options)
    with init_empty_weights():
        empty = Net()
    for model in (bnb.load_and_quantize_model(empty, config, checkpoint), bnb.load_and_quantize_model(Net(), config)):
        dtypes = {name: tensor.dtype for name, tensor in model.named_parameters()}
        assert dtypes["norm.weight"] is dtypes["twice.weight"] is torch.float32
        assert dtypes["emb.weight"] is dtypes["body.0.bias"] is torch.float16
        assert dtypes["head.weight"] is dtypes["body.0.weight"] is torch.int8


def test_quantised_layers_are_not_quantised_again(checkpoint, caplog):
    model = _loaded(checkpoint, "int8")
    with torch.no_grad():
        expected = model(IDS)
    weight = model.twice.weight.data
    with caplog.at_level(logging.WARNING):
        again = bnb.load_and_quantize_model(model, BnbQuantizationConfig(load_in_8bit=True))
    assert "no linear layer" in caplog.text and torch.equal(again.twice.weight.data, weight)
    with torch.no_grad():
        assert torch.equal(again(IDS), expected)
