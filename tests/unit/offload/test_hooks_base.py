"""Adding hooks to modules and taking them off."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
from torch import nn

from accelerate.offload.hooks_base import (
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    guard_method,
    remove_hook_from_module,
)


class Note(ModelHook):
    """Writes down what is called."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def init_hook(self, module):
        self.log.append(f"init {self.name}")
        return module

    def pre_forward(self, module, *args, **kwargs):
        self.log.append(f"pre {self.name}")
        return args, kwargs

    def post_forward(self, module, output):
        self.log.append(f"post {self.name}")
        return output

    def detach_hook(self, module):
        self.log.append(f"detach {self.name}")
        return module


def _calls(log):
    taken = list(log)
    log.clear()
    return taken


def test_a_hooked_forward_is_a_partial_of_the_module_with_its_signature():
    layer = nn.Linear(2, 2)
    hook = ModelHook()
    assert add_hook_to_module(layer, hook) is layer
    assert isinstance(layer.forward, functools.partial) and layer.forward.args[0] is layer
    assert layer.__dict__["_hf_hook"] is hook
    assert layer.__dict__["_old_forward"].__func__ is nn.Linear.forward
    assert list(inspect.signature(layer.forward).parameters) == ["input"]
    assert layer.forward.__name__ == "forward"


def test_removal_leaves_the_module_exactly_as_it_was():
    layer = nn.Linear(2, 2)
    before = dict(layer.__dict__)
    add_hook_to_module(layer, ModelHook())
    assert remove_hook_from_module(layer) is layer
    assert layer.__dict__ == before
    remove_hook_from_module(layer)
    assert layer.__dict__ == before


def test_a_forward_on_the_instance_comes_back():
    layer = nn.Linear(2, 2)
    own = layer.forward = lambda x: "own"
    add_hook_to_module(layer, ModelHook())
    assert layer(torch.ones(1, 2)) == "own"
    remove_hook_from_module(layer)
    assert layer.forward is own


def test_rebinding_the_old_forward_or_the_hook_takes_effect():
    layer = add_hook_to_module(nn.Linear(2, 2), ModelHook())
    layer._old_forward = lambda x: "rebound"
    assert layer(torch.ones(1, 2)) == "rebound"
    log = []
    layer._hf_hook = Note("late", log)
    layer(torch.ones(1, 2))
    assert log == ["pre late", "post late"]


def test_hooks_replace_append_and_nest_in_order():
    log = []
    layer = nn.Identity()
    add_hook_to_module(layer, Note(1, log))
    add_hook_to_module(layer, Note(2, log))
    layer(torch.ones(1))
    assert _calls(log) == ["init 1", "init 2", "pre 2", "post 2"]
    add_hook_to_module(layer, Note(3, log), append=True)
    assert _calls(log) == ["detach 2", "init 2", "init 3"]
    assert type(layer._hf_hook) is SequentialHook and [hook.name for hook in layer._hf_hook.hooks] == [2, 3]
    layer(torch.ones(1))
    assert _calls(log) == ["pre 2", "pre 3", "post 2", "post 3"]
    remove_hook_from_module(layer)
    assert _calls(log) == ["detach 2", "detach 3"]


def test_init_hook_is_looked_up_when_the_hook_is_added(monkeypatch):
    seen = []
    monkeypatch.setattr(ModelHook, "init_hook", lambda self, module: seen.append(module) or module)
    layer = nn.Identity()
    add_hook_to_module(layer, ModelHook())
    assert seen == [layer]


def test_no_grad_hooks_record_nothing():
    hook = ModelHook()
    hook.no_grad = True
    layer = add_hook_to_module(nn.Linear(2, 2), hook)
    assert not layer(torch.ones(1, 2)).requires_grad
    assert ModelHook.no_grad is False


def test_copies_and_pickles_are_hooked_on_their_own():
    layer = add_hook_to_module(nn.Linear(2, 2), SequentialHook(ModelHook(), ModelHook()))
    blob = pickle.dumps(layer)
    assert b"accelerate.hooks" in blob
    for other in (copy.deepcopy(layer), pickle.loads(blob)):
        assert other.forward.args[0] is other and other._old_forward.__self__ is other
        assert torch.equal(other(torch.ones(1, 2)), layer(torch.ones(1, 2)))
        with torch.no_grad():
            other.weight.zero_()
        assert not torch.equal(other(torch.ones(1, 2)), layer(torch.ones(1, 2)))


def test_graph_modules_are_hooked_on_their_class_and_restored():
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    plain = graph(torch.ones(1, 2))
    function = type(graph).forward
    log = []
    add_hook_to_module(graph, Note("g", log))
    assert "forward" not in graph.__dict__ and graph.forward.args[0] is graph
    assert torch.equal(graph(torch.ones(1, 2)), plain) and log == ["init g", "pre g", "post g"]
    remove_hook_from_module(graph)
    assert type(graph).forward is function and torch.equal(graph(torch.ones(1, 2)), plain)


def test_guards_run_first_and_go_with_the_hooks():
    layer = nn.Linear(2, 2)
    seen = []
    guard_method(layer, "to", seen.append)
    guard_method(layer, "to", seen.append)
    assert layer.to(torch.float64) is layer and seen == [layer]
    assert layer.weight.dtype is torch.float64
    remove_hook_from_module(layer)
    assert "to" not in layer.__dict__
    layer.cuda = lambda: "mine"
    remove_hook_from_module(layer)
    assert layer.cuda() == "mine"


def test_cpu_offload_moves_the_model_on_forward_and_its_predecessor_away():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    moved = []
    first_hook = CpuOffload("cpu")
    add_hook_to_module(first, first_hook)
    user = UserCpuOffloadHook(first, first_hook)
    user.offload = lambda: moved.append(first)
    add_hook_to_module(second, CpuOffload("cpu", prev_module_hook=user))
    second(torch.ones(1, 2))
    assert moved == [first]
    second._hf_hook.prev_module_hook = None
    second(torch.ones(1, 2))
    assert moved == [first]


def test_cpu_offload_brings_model_and_inputs_to_the_device():
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x
    add_hook_to_module(layer, CpuOffload("meta"))
    assert layer.weight.device.type == "cpu"
    assert layer(torch.ones(1, 2)).device.type == "meta" and layer.weight.device.type == "meta"


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float8_e4m3fn])
def test_layerwise_casting_stores_narrow_and_computes_wide(storage):
    layer = nn.Linear(2, 2)
    add_hook_to_module(layer, LayerwiseCastingHook(storage, torch.float32, non_blocking=False))
    assert layer.weight.dtype is storage
    assert layer(torch.ones(1, 2)).dtype is torch.float32
    assert layer.weight.dtype is storage
    remove_hook_from_module(layer)
    assert layer.weight.dtype is torch.float32
