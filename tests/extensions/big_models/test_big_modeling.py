"""Models that are made empty, and spread over devices."""

import logging
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import big_modeling
from accelerate.big_modeling import (
    attach_layerwise_casting_hooks,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
)
from accelerate.hooks import remove_hook_from_submodules
from cases import cases
from offload_models import Net


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Linear(4, 4, bias=False)
        self.mid = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(self.mid(self.emb(x)))


MIXED = {"linear1": "cpu", "norm": "disk", "linear2": "disk"}


@pytest.fixture
def model():
    return Net().eval()


@pytest.fixture
def inputs():
    return torch.randn(2, 3)


def test_cpu_modules_are_offloaded_when_another_device_computes(model):
    dispatch_model(model, {"linear1": "meta", "norm": "cpu", "linear2": "cpu"})
    hook = model.linear2._hf_hook
    assert hook.offload and hook.execution_device == "meta"
    assert hook.weights_map["weight"].device.type == "cpu"
    assert set(dict(hook.weights_map.dataset)) == {
        name for name in Net().state_dict() if name.startswith(("norm", "linear2"))
    }
    assert model._hf_hook.execution_device == "meta" and model._hf_hook.io_same_device


def test_moving_a_dispatched_model_warns_and_with_offloaded_parts_raises(model, tmp_path, caplog):
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with caplog.at_level(logging.WARNING):
        assert model.to("cpu") is model
    assert "shouldn't move a model" in caplog.text
    remove_hook_from_submodules(model)
    dispatch_model(model, MIXED, offload_dir=tmp_path)
    for move in (lambda: model.to("cpu"), lambda: model.cuda()):
        with pytest.raises(RuntimeError, match="can't move a model"):
            move()
    remove_hook_from_submodules(model)
    assert "to" not in model.__dict__ and model.to("cpu") is model


@pytest.mark.parametrize("home", ["cpu", "disk", "parts"])
def test_tied_weights_are_one_again_when_hooks_are_taken_off(home, tmp_path):
    model = _Tied()
    x = torch.randn(2, 4)
    plain = model(x)
    if home == "parts":
        dispatch_model(model, {"emb": "disk", "mid": "cpu", "head": "disk"}, offload_dir=tmp_path)
    else:
        cpu_offload(model, "cpu") if home == "cpu" else disk_offload(model, tmp_path)
    assert torch.equal(model(x), plain)
    remove_hook_from_submodules(model)
    assert model.emb.weight is model.head.weight and torch.equal(model(x), plain)
    disk_offload(model, tmp_path)
    model.head = nn.Linear(4, 4, bias=False)  # a new head has no twin
    remove_hook_from_submodules(model)
    assert model.emb.weight.device.type == "cpu"


def test_a_tied_weight_missing_from_the_index_is_found_under_its_other_name(tmp_path):
    model = _Tied()
    x = torch.randn(2, 4)
    plain = model(x)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "m.safetensors")
    index = {name: {"safetensors_file": str(tmp_path / "m.safetensors")} for name in state}
    dispatch_model(model, {"": "disk"}, offload_index=index)
    assert torch.equal(model(x), plain)


def test_weights_that_nobody_has_are_named_before_anything_is_changed(tmp_path):
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    save_file({"1.weight": torch.ones(2, 2), "1.bias": torch.ones(2)}, tmp_path / "m.safetensors")
    index = {name: {"safetensors_file": str(tmp_path / "m.safetensors")} for name in ("1.weight", "1.bias")}
    for device_map in ({"0": "cpu", "1": "disk", "2": "cpu"}, {"": "disk"}):
        with pytest.raises(ValueError, match=r"meta device and their data is missing: 0\.bias .*0\.weight"):
            dispatch_model(model, device_map, offload_index=index)
        assert not any("_hf_hook" in module.__dict__ for module in model.modules())
    dispatch_model(model, {"0": "meta", "1": "disk", "2": "meta"}, main_device="cpu", offload_index=index)
    assert torch.equal(model[1](torch.ones(1, 2)), torch.tensor([[3.0, 3.0]]))


def test_models_without_data_are_not_offloaded(tmp_path, inputs):
    with init_empty_weights():
        model = Net().eval()
    for call in (lambda: cpu_offload(model), lambda: disk_offload(model, tmp_path)):
        with pytest.raises(ValueError, match=r"their data is missing: linear1\.bias"):
            call()
        assert not any("_hf_hook" in module.__dict__ for module in model.modules()) and list(tmp_path.iterdir()) == []
    full = Net().eval()
    cpu_offload(model, "cpu", state_dict=full.state_dict())
    assert torch.equal(model(inputs), full(inputs))
    with pytest.raises(ValueError, match="their data is missing"):
        disk_offload(model, tmp_path)  # the hooks have it, but only they


def test_a_computed_map_offloads_what_does_not_fit(model, inputs, tmp_path):
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = Net().eval()
    options = {"max_memory": {"cpu": 170}, "offload_folder": tmp_path / "o", "offload_buffers": True}
    load_checkpoint_and_dispatch(empty, tmp_path, device_map="auto", **options)
    assert empty.hf_device_map == {"linear1": "cpu", "norm": "disk", "linear2": "disk"}
    assert torch.equal(empty(inputs), model(inputs))
    with pytest.raises(ValueError, match="'foo'"):
        load_checkpoint_and_dispatch(empty, tmp_path, device_map="foo")


@cases(
    "skip",
    {"skip_modules_pattern": "sub"},
    {"skip_modules_pattern": ("^sub", "x")},
    {"skip_modules_classes": nn.Sequential},
    {"skip_modules_classes": (nn.Linear,)},
)
def test_layerwise_casting_skips_what_is_named(skip):
    model = nn.ModuleDict({"conv": nn.Conv1d(1, 1, 1), "sub": nn.Sequential(nn.Linear(2, 2))})
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, **skip)
    assert model["conv"].weight.dtype is torch.bfloat16 and model["sub"][0].weight.dtype is torch.float32


# --- made elsewhere ---


def _devices(module):
    return {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]}


def test_parameters_take_no_memory_and_buffers_on_request_and_by_environment(monkeypatch):
    with init_empty_weights():
        norm, loose = nn.BatchNorm1d(3), torch.ones(2)
    assert norm.weight.device.type == "meta" and norm.running_mean.device.type == loose.device.type == "cpu"
    assert _devices(nn.Linear(1, 1)) == {"cpu"}
    with init_empty_weights(include_buffers=True):
        assert _devices(nn.BatchNorm1d(3)) == {"meta"}
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with init_empty_weights():
        assert _devices(nn.BatchNorm1d(3)) == {"meta"}
    with init_empty_weights(include_buffers=False):
        assert _devices(nn.BatchNorm1d(3)) == {"meta", "cpu"}


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(4, dtype=torch.float64), nn.LazyBatchNorm1d])
def test_lazy_parameters_are_made_on_the_device(make):
    with init_empty_weights():
        layer = make()
        layer.weight.note = "kept"
        with init_on_device("cpu"):
            assert _devices(make()) == {"cpu"}
        layer.register_parameter("weight", layer.weight)
    kinds = {name: (type(tensor), tensor.dtype) for name, tensor in make().named_parameters()}
    assert {name: (type(tensor), tensor.dtype) for name, tensor in layer.named_parameters()} == kinds
    assert layer.weight.note == "kept" and {parameter.device.type for parameter in layer.parameters()} == {"meta"}
    layer.initialize_parameters(torch.zeros(2, 3))
    assert layer.weight.device.type == "meta" and layer.weight.shape[-1] == 3


def test_nesting_decorating_and_errors_restore_torch():
    register = nn.Module.register_parameter
    build = init_on_device("meta")(lambda: nn.Linear(1, 1))
    assert _devices(build()) == _devices(build()) == {"meta"}
    with pytest.raises(KeyError), init_empty_weights():
        with init_on_device("cpu"):
            assert _devices(nn.Linear(1, 1)) == {"cpu"}
        assert _devices(nn.Linear(1, 1)) == {"meta"}
        raise KeyError
    assert nn.Module.register_parameter is register


def test_own_context_parallelism_makes_attention_causal_without_a_mask():
    class Attention(nn.Module):
        def forward(self, hidden, **kwargs):
            return kwargs

    model = nn.ModuleDict({"self_attn": Attention(), "cross": Attention()})
    big_modeling._attach_context_parallel_hooks(model)
    mask = torch.ones(1)
    assert model["self_attn"](mask, attention_mask=mask) == {"attention_mask": None, "is_causal": True}
    assert model["self_attn"](mask) == {}
    assert model["cross"](mask, attention_mask=mask) == {"attention_mask": mask}


def test_recurrent_layers_are_refused_under_sequence_parallelism():
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(layer_types=["full_attention", "sliding_attention"])
    big_modeling._refuse_recurrent_layers_under_sequence_parallelism(model)
    model.config.layer_types.append("linear_attention")
    with pytest.raises(ValueError, match="linear_attention"):
        big_modeling._refuse_recurrent_layers_under_sequence_parallelism(model)
