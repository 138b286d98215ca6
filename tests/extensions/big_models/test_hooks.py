"""Adding hooks to modules and taking them off; hooks that move or cast modules, and those that align devices."""

from unittest import mock

import pytest
import torch
from torch import nn

from accelerate import cpu_offload, hooks
from accelerate.extensions.big_models.hooks_base import guard_method
from accelerate.utils.modeling import align_module_device
from accelerate.utils.versions import is_torch_version
from offload_models import Net


def test_removal_leaves_the_module_exactly_as_it_was():
    layer = nn.Linear(2, 2)
    for own in (None, lambda x: "own"):
        if own is not None:
            layer.forward = own
        before = dict(layer.__dict__)
        hooks.add_hook_to_module(layer, hooks.ModelHook())
        assert own is None or layer(torch.ones(1, 2)) == "own"
        for _ in range(2):
            assert hooks.remove_hook_from_module(layer) is layer and layer.__dict__ == before


def test_no_grad_hooks_record_nothing():
    hook = hooks.ModelHook()
    hook.no_grad = True
    layer = hooks.add_hook_to_module(nn.Linear(2, 2), hook)
    assert not layer(torch.ones(1, 2)).requires_grad
    assert hooks.ModelHook.no_grad is False


def test_graph_modules_are_hooked_on_their_class_and_restored():
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    plain = graph(torch.ones(1, 2))
    function = type(graph).forward
    hook = mock.Mock(wraps=hooks.ModelHook(), no_grad=False)
    hooks.add_hook_to_module(graph, hook)
    assert "forward" not in graph.__dict__ and graph.forward.args[0] is graph
    assert torch.equal(graph(torch.ones(1, 2)), plain)
    assert [call[0] for call in hook.method_calls] == ["init_hook", "pre_forward", "post_forward"]
    hooks.remove_hook_from_module(graph)
    assert type(graph).forward is function and torch.equal(graph(torch.ones(1, 2)), plain)


def test_guards_run_first_and_go_with_the_hooks():
    layer = nn.Linear(2, 2)
    seen = []
    guard_method(layer, "to", seen.append)
    guard_method(layer, "to", seen.append)
    assert layer.to(torch.float64) is layer and seen == [layer]
    assert layer.weight.dtype is torch.float64
    hooks.remove_hook_from_module(layer)
    assert "to" not in layer.__dict__
    layer.cuda = lambda: "mine"
    hooks.remove_hook_from_module(layer)
    assert layer.cuda() == "mine"


def test_cpu_offload_brings_model_and_inputs_to_the_device_and_its_predecessor_away():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.forward = lambda x: x
    moved = []
    user = hooks.UserCpuOffloadHook(first, hooks.CpuOffload("cpu"))
    user.offload = lambda: moved.append(first)
    hooks.add_hook_to_module(second, hooks.CpuOffload("meta", prev_module_hook=user))
    assert second.weight.device.type == "cpu"
    assert second(torch.ones(1, 2)).device.type == second.weight.device.type == "meta" and moved == [first]
    second._hf_hook.prev_module_hook = None
    second(torch.ones(1, 2))
    assert moved == [first]


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float8_e4m3fn])
def test_layerwise_casting_stores_narrow_and_computes_wide(storage):
    layer = nn.Linear(2, 2)
    hooks.add_hook_to_module(layer, hooks.LayerwiseCastingHook(storage, torch.float32, non_blocking=False))
    assert layer.weight.dtype is storage
    assert layer(torch.ones(1, 2)).dtype is torch.float32
    assert layer.weight.dtype is storage
    hooks.remove_hook_from_module(layer)
    assert layer.weight.dtype is torch.float32


# --- hooks that align devices ---


def test_driving_a_hook_by_hand_and_a_plain_dict_as_weights_map():
    layer = nn.Linear(2, 2, bias=False)
    hook = hooks.AlignDevicesHook("cpu", offload=True)
    hooks.add_hook_to_module(layer, hook)
    hook.pre_forward(layer)
    with torch.no_grad():
        layer.weight.fill_(7)
    merged = layer.weight.detach().clone()
    hook.weights_map = {"weight": merged}
    hook.post_forward(layer, torch.tensor([]))
    assert layer.weight.device.type == "meta"
    assert (layer(torch.ones(1, 2)) == 14).all()


def test_inputs_follow_and_outputs_return_except_skipped_keys():
    class Echo(nn.Module):
        def forward(self, x, past=None):
            self.seen = (x.device.type, past.device.type)
            return {"x": torch.ones(1), "past": past}

    echo = hooks.add_hook_to_module(Echo(), hooks.AlignDevicesHook("meta", io_same_device=True, skip_keys="past"))
    echo(torch.ones(1), past=torch.ones(1))
    assert echo.seen == ("meta", "cpu")
    assert echo._hf_hook.input_device == torch.device("cpu")
    echo._hf_hook.input_device = torch.device("meta")
    output = echo._hf_hook.post_forward(echo, {"x": torch.ones(1), "past": torch.ones(1)})
    assert {key: value.device.type for key, value in output.items()} == {"x": "meta", "past": "cpu"}


def test_weights_without_data_are_named():
    layer = nn.Linear(2, 2).to("meta")
    with pytest.raises(ValueError, match="'weight' of Linear is on the meta device"):
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("cpu", offload=True))
    assert "_old_forward" not in layer.__dict__ and "_hf_hook" not in layer.__dict__
    norm = nn.BatchNorm1d(2).to("meta")
    with pytest.raises(ValueError, match="'running_mean' is on the meta device"):
        hooks.add_hook_to_module(
            norm, hooks.AlignDevicesHook("cpu", offload=True, weights_map=dict(nn.BatchNorm1d(2).state_dict()))
        )
    layer = hooks.add_hook_to_module(nn.Linear(2, 2), hooks.AlignDevicesHook("cpu", offload=True))
    layer._hf_hook.weights_map = None
    with pytest.raises(ValueError, match="'weight' is on the meta device"):
        layer(torch.ones(1, 2))


def test_appending_to_a_hooked_block_keeps_both():
    model = nn.Sequential(nn.Linear(2, 2))
    hooks.add_hook_to_module(model[0], hooks.AlignDevicesHook("cpu"))
    hooks.attach_align_device_hook(model, "cpu", offload=True)
    assert isinstance(model[0]._hf_hook, hooks.SequentialHook) and len(model[0]._hf_hook.hooks) == 2
    assert model[0].weight.device.type == "meta"
    assert model(torch.ones(1, 2)).device.type == "cpu"


def test_tied_weights_in_memory_share_one_copy_and_files_share_none():
    value = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    for weights, shared in (({"weight": value.data}, {"weight"}), ({"weight": value.data.clone()}, set())):
        layer = nn.Linear(2, 2, bias=False)
        layer.weight = value
        ties = {value.data_ptr(): {}}
        hook = hooks.AlignDevicesHook("cpu", offload=True, weights_map=weights, tied_params_map=ties)
        hooks.add_hook_to_module(layer, hook)
        assert hook.tied_params_names == shared
        hook.pre_forward(layer)
        assert ties == ({value.data_ptr(): {"cpu": layer.weight}} if shared else {value.data_ptr(): {}})
        hook.post_forward(layer, None)
        assert ties == {value.data_ptr(): {}}


def _offloaded_layer():
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data.fill_(1)
    return hooks.add_hook_to_module(
        layer, hooks.AlignDevicesHook("cpu", offload=True, weights_map={"weight": torch.ones(2, 2)})
    )


def test_what_is_said_of_gradients_while_weights_are_there_stays():
    layer = _offloaded_layer()
    for wanted in (False, True):
        for _ in range(2):
            with align_module_device(layer):
                layer.weight.requires_grad_(wanted)
            assert layer.weight.is_meta and layer.weight.requires_grad is wanted


def test_whatever_is_put_in_its_place_the_stored_weight_stays():
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
    layer.weight = nn.Parameter(torch.zeros(2, 2))  # makes place for the stored one
    for _ in range(2):
        assert (layer(x) == 2).all() and layer.weight.is_meta


@pytest.mark.skipif(is_torch_version("<", "2.9"), reason="torch.compile before 2.9 stops at the hooks' generators")
def test_models_that_hooks_leave_in_place_compile_without_a_break(recwarn):
    model, inputs = Net().eval(), torch.randn(2, 3)
    plain = model(inputs)
    hooks.attach_align_device_hook_on_blocks(model, dict.fromkeys(["linear1", "norm", "linear2", ""], "cpu"))
    try:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(3):
            assert torch.equal(compiled(inputs), plain)
    finally:
        torch._dynamo.reset()
    assert not [warning for warning in recwarn if "Dynamo" in str(warning.message)]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.calls = self.calls + 1
        return inputs * self.weight


def test_buffers_that_stay_keep_their_values_when_hooks_come_and_go():
    model = Counting()
    cpu_offload(model, "cpu")
    model(torch.ones(1))
    hooks.add_hook_to_module(model, hooks.ModelHook(), append=True)
    model(torch.ones(1))
    hooks.remove_hook_from_submodules(model)
    assert model.calls == 2 and model.weight == 1


def test_weights_given_under_one_name_of_a_tie_serve_the_other():
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))
    model[1].weight = model[0].weight
    cpu_offload(model, "cpu", state_dict={"0.weight": 2 * torch.eye(2)})
    assert model(torch.ones(1, 2)).tolist() == [[4, 4]]
