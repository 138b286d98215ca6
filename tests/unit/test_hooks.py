"""Hooks that align devices, and attaching them."""

import pytest
import torch
from torch import nn

import accelerate.hooks as hooks
from accelerate.hooks import (
    AlignDevicesHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.utils.modeling import align_module_device, has_offloaded_params
from accelerate.utils.offload import OffloadedWeightsLoader


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.register_buffer("local", torch.ones(1), persistent=False)

    def forward(self, x):
        return self.linear2(self.norm(self.linear1(x))) * self.scale * self.local


@pytest.fixture
def model():
    return _Net().eval()


@pytest.fixture
def inputs():
    return torch.randn(2, 3)


def _devices(module):
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.device.type for name, tensor in tensors.items()}


def test_attributes_other_libraries_read_are_plain_and_settable():
    hook = AlignDevicesHook(0, True, True, {}, True, True, "past", {})
    assert (hook.execution_device, hook.offload, hook.io_same_device, hook.weights_map) == (0, True, True, {})
    assert (hook.offload_buffers, hook.place_submodules, hook.skip_keys, hook.tied_params_map) == (
        True,
        True,
        "past",
        {},
    )
    hook.offload = hook.io_same_device = False
    hook.original_devices = {"weight": torch.device("cpu")}
    assert type(hook).__name__ == "AlignDevicesHook" and type(hook).__module__ == "accelerate.hooks"
    assert set(hooks._accelerate_added_attributes) >= {"to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"}


def test_weights_go_to_the_execution_device_at_once():
    layer = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook(execution_device="meta"))
    assert _devices(layer) == {"weight": "meta", "bias": "meta"}
    outer = add_hook_to_module(nn.Sequential(nn.Linear(2, 2)), AlignDevicesHook(execution_device="meta"))
    assert _devices(outer) == {"0.weight": "cpu", "0.bias": "cpu"}
    add_hook_to_module(outer, AlignDevicesHook(execution_device="meta", place_submodules=True))
    assert _devices(outer) == {"0.weight": "meta", "0.bias": "meta"}


def test_removal_brings_weights_back(model, inputs):
    plain, before = model(inputs), {name: dict(m.__dict__) for name, m in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True, offload_buffers=True)
    assert _devices(model)["norm.running_mean"] == "meta"
    remove_hook_from_submodules(model)
    assert set(_devices(model).values()) == {"cpu"} and torch.equal(model(inputs), plain)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(set(m.__dict__) == set(before[name]) for name, m in model.named_modules())


def test_a_hook_told_not_to_offload_reloads_nothing_on_removal():
    layer = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook("cpu", offload=True))
    layer._hf_hook.offload = False
    remove_hook_from_module(layer)
    assert _devices(layer) == {"weight": "meta", "bias": "meta"}


def test_driving_a_hook_by_hand_and_a_plain_dict_as_weights_map():
    layer = nn.Linear(2, 2, bias=False)
    hook = AlignDevicesHook("cpu", offload=True)
    add_hook_to_module(layer, hook)
    hook.pre_forward(layer)
    with torch.no_grad():
        layer.weight.fill_(7)
    merged = layer.weight.detach().clone()
    hook.weights_map = {"weight": merged}
    hook.post_forward(layer, torch.tensor([]))
    assert layer.weight.device.type == "meta"
    assert (layer(torch.ones(1, 2)) == 14).all()


def test_init_can_be_replaced_while_a_hook_is_added(monkeypatch):
    monkeypatch.setattr(AlignDevicesHook, "init_hook", lambda self, module: module)
    layer = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook("cpu", offload=True))
    assert _devices(layer)["weight"] == "cpu"


def test_inputs_follow_and_outputs_return_except_skipped_keys():
    class Echo(nn.Module):
        def forward(self, x, past=None):
            self.seen = (x.device.type, past.device.type)
            return {"x": torch.ones(1), "past": past}

    echo = add_hook_to_module(Echo(), AlignDevicesHook("meta", io_same_device=True, skip_keys="past"))
    echo(torch.ones(1), past=torch.ones(1))
    assert echo.seen == ("meta", "cpu")
    assert echo._hf_hook.input_device == torch.device("cpu")
    echo._hf_hook.input_device = torch.device("meta")
    output = echo._hf_hook.post_forward(echo, {"x": torch.ones(1), "past": torch.ones(1)})
    assert {key: value.device.type for key, value in output.items()} == {"x": "meta", "past": "cpu"}


def test_weights_without_data_are_named():
    layer = nn.Linear(2, 2).to("meta")
    with pytest.raises(ValueError, match="'weight' of Linear is on the meta device"):
        add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    assert "_old_forward" not in layer.__dict__ and "_hf_hook" not in layer.__dict__
    norm = nn.BatchNorm1d(2).to("meta")
    with pytest.raises(ValueError, match="'running_mean' is on the meta device"):
        add_hook_to_module(
            norm, AlignDevicesHook("cpu", offload=True, weights_map=dict(nn.BatchNorm1d(2).state_dict()))
        )
    layer = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook("cpu", offload=True))
    layer._hf_hook.weights_map = None
    with pytest.raises(ValueError, match="'weight' is on the meta device"):
        layer(torch.ones(1, 2))


def test_execution_hooks_cover_modules_with_weights_down_to_preloaded_classes(model):
    attach_execution_device_hook(model, "cpu")
    assert [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")] == [
        "",
        "linear1",
        "norm",
        "linear2",
    ]
    first = model._hf_hook
    attach_execution_device_hook(model, "meta")
    assert model._hf_hook is first
    remove_hook_from_submodules(model)
    attach_execution_device_hook(model, "cpu", preload_module_classes=["_Net"])
    assert [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")] == [""]


def _kinds(model):
    return {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}


def test_one_device_for_all_blocks_is_one_hook(model):
    attach_align_device_hook_on_blocks(model, "cpu")
    (hook,) = _kinds(model).values()
    assert hook.io_same_device and hook.place_submodules and not hook.offload


def test_tensors_of_a_split_module_follow_their_own_entry(model, inputs):
    plain = model(inputs)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = ["scale", "linear1", "norm", "linear2"]
    attach_align_device_hook_on_blocks(
        model,
        execution_device={**dict.fromkeys(names, "cpu"), "": "cpu"},
        offload={**dict.fromkeys(names, False), "scale": True},
        weights_map=OffloadedWeightsLoader(state_dict=state),
    )
    assert _devices(model)["scale"] == "meta" and _devices(model)["local"] == "cpu"
    assert torch.equal(model(inputs), plain)


def test_a_second_dispatch_replaces_the_hook_of_the_root(model):
    for _ in range(2):
        attach_align_device_hook_on_blocks(model, {"scale": "cpu", "linear1": "cpu"})
    assert isinstance(model._hf_hook, AlignDevicesHook)


def test_appending_to_a_hooked_block_keeps_both():
    model = nn.Sequential(nn.Linear(2, 2))
    add_hook_to_module(model[0], AlignDevicesHook("cpu"))
    attach_align_device_hook(model, "cpu", offload=True)
    assert isinstance(model[0]._hf_hook, SequentialHook) and len(model[0]._hf_hook.hooks) == 2
    assert model[0].weight.device.type == "meta"
    assert model(torch.ones(1, 2)).device.type == "cpu"


def test_tied_weights_in_memory_share_one_copy_and_files_share_none():
    value = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    for weights, shared in (({"weight": value.data}, {"weight"}), ({"weight": value.data.clone()}, set())):
        layer = nn.Linear(2, 2, bias=False)
        layer.weight = value
        ties = {value.data_ptr(): {}}
        hook = AlignDevicesHook("cpu", offload=True, weights_map=weights, tied_params_map=ties)
        add_hook_to_module(layer, hook)
        assert hook.tied_params_names == shared
        hook.pre_forward(layer)
        assert ties == ({value.data_ptr(): {"cpu": layer.weight}} if shared else {value.data_ptr(): {}})
        hook.post_forward(layer, None)
        assert ties == {value.data_ptr(): {}}


def test_align_module_device_uses_the_hook_and_restores_it():
    layer = nn.Linear(2, 2)
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    assert has_offloaded_params(layer)
    with align_module_device(layer):
        assert layer.weight.device.type == "cpu"
        with torch.no_grad():
            layer.weight.fill_(3)
    assert layer.weight.device.type == "meta"
    assert (layer._hf_hook.weights_map["weight"] == 3).all()
    with align_module_device(layer, "meta"):
        assert layer._hf_hook.execution_device == "meta"
    assert layer._hf_hook.execution_device == "cpu"


def _offloaded_layer():
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data.fill_(1)
    return add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map={"weight": torch.ones(2, 2)}))


def test_what_is_said_of_gradients_while_weights_are_there_stays():
    layer = _offloaded_layer()
    for wanted in (False, True):
        for _ in range(2):
            with align_module_device(layer):
                layer.weight.requires_grad_(wanted)
            assert layer.weight.is_meta and layer.weight.requires_grad is wanted


def test_a_forward_that_raises_after_it_gave_a_weight_other_data_leaves_the_stored_one():
    layer = _offloaded_layer()
    x = torch.ones(1, 2)
    layer(x)
    forward = layer._old_forward

    def fails(x):
        layer.weight.data = torch.zeros(2, 2)
        raise RuntimeError("stop")

    layer._old_forward = fails
    with pytest.raises(RuntimeError, match="stop"):
        layer(x)
    layer._old_forward = forward
    for _ in range(2):
        assert (layer(x) == 2).all() and layer.weight.is_meta


def test_a_weight_that_is_put_into_an_offloaded_module_makes_place_for_the_stored_one():
    layer = _offloaded_layer()
    x = torch.ones(1, 2)
    layer(x)
    layer.weight = nn.Parameter(torch.zeros(2, 2))
    for _ in range(2):
        assert (layer(x) == 2).all() and layer.weight.is_meta


@pytest.mark.parametrize("way", ["offloaded", "placed"])
def test_hooked_models_compile(way, model, inputs, recwarn):
    plain = model(inputs)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if way == "offloaded":
        attach_align_device_hook(model, "cpu", offload=True, weights_map=OffloadedWeightsLoader(state_dict=state))
    else:
        attach_align_device_hook_on_blocks(model, dict.fromkeys(["linear1", "norm", "linear2", ""], "cpu"))
    try:
        compiled = torch.compile(model, backend="eager", fullgraph=way == "placed")
        for _ in range(3):
            assert torch.equal(compiled(inputs), plain)
    finally:
        torch._dynamo.reset()
    assert not [warning for warning in recwarn if "Dynamo" in str(warning.message)]
    assert _devices(model)["linear1.weight"] == ("meta" if way == "offloaded" else "cpu")
