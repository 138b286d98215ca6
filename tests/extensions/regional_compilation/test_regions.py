"""Compilation by regions: what is compiled, what is shared, what stays."""

import functools
import subprocess
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate import Accelerator
from accelerate.extensions.regional_compilation import regions
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.modules.unwrap import extract_model_from_parallel, get_module_children_bottom_up, is_compiled_module
from accelerate.utils import TorchDynamoPlugin


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.layers = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x * self.scale + self.shift


def test_regions_are_compiled_around_uncompiled_parents():
    net, x = Net(), torch.randn(3, 2)
    net.forward = net.forward  # on the instance
    compiled = regions.compile_regions(net, backend="eager")
    assert regions.has_compiled_regions(compiled) and not regions.has_compiled_regions(net)
    assert compiled.shift is net.shift and compiled.forward.__self__ is compiled
    assert torch.equal(compiled(x), net(x))
    names = [name for name, _ in get_module_children_bottom_up(net.layers, return_fqns=True)]
    assert names == ["0.linear", "0", "1.linear", "1", ""]


class Listed(Net):
    """Calls its blocks through a list that is not registered."""

    def __init__(self):
        super().__init__()
        self.steps = {"all": list(self.layers)}

    def forward(self, x):
        for layer in self.steps["all"]:
            x = layer(x)
        return x


def hooked(net):
    add_hook_to_module(net, ModelHook())


def closed_over(net):
    former = net.forward
    net.forward = lambda x: former(x)


def closed_over_in_method(net):
    former = net.forward
    net.forward = types.MethodType(lambda self, x: former(x), net)


def partial(net):
    net.forward = functools.partial(type(net).forward, net)


def called_by_method(net):
    net.encode = net.forward
    net.forward = types.MethodType(lambda self, x: self.encode(x), net)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (Net, hooked),
        (Net, closed_over),
        (Net, closed_over_in_method),
        (Net, partial),
        (Net, called_by_method),
        (Listed, None),
    ],
)
def test_compiled_blocks_run_where_a_forward_was_replaced(make, change, inside):
    calls, net, x = [], make(), torch.randn(3, 2)
    if change is not None:
        change(net)
    expected, model = net(x), nn.ModuleList([net, nn.ReLU()]) if inside else net
    names = list(model.state_dict())

    def counting(graph, inputs):
        return lambda *args: calls.append(1) or graph.forward(*args)

    torch._dynamo.reset()
    compiled = regions.compile_regions(model, backend=counting)
    compiled = regions.compile_regions(compiled, backend=counting)  # nothing is compiled twice
    result = (compiled[0] if inside else compiled)(x)
    torch.testing.assert_close(result, expected)
    assert len(calls) >= 2 and list(model.state_dict()) == names


def test_containers_without_forward_are_not_compiled():
    shared = Block()
    net = nn.ModuleDict({"blocks": nn.ModuleList([shared]), "mixed": nn.ModuleList([shared, nn.ReLU()])})
    net["weights"] = nn.ParameterList([nn.Parameter(torch.ones(1))])
    compiled = regions.compile_regions(net, backend="eager")
    assert isinstance(compiled["mixed"], nn.ModuleList)
    assert is_compiled_module(compiled["mixed"][1]) and compiled["mixed"][0] is compiled["blocks"][0]
    assert compiled["weights"][0] is net["weights"][0]


@pytest.mark.parametrize("compile_in_place", [regions.compile_regions_deepspeed, regions.compile_regions_fsdp2])
def test_regions_compile_in_place(compile_in_place):
    net = Net()
    modules = list(net.modules())
    result = compile_in_place(net, backend="eager")
    assert result is (net if compile_in_place is regions.compile_regions_fsdp2 else None)
    assert list(net.modules()) == modules
    compiled = [name for name, module in net.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["embed", "layers.0", "layers.1"]


def test_compilation_is_kept_or_taken_off(process_group):
    net = nn.ModuleDict({"blocks": nn.ModuleList([nn.ReLU(), nn.ReLU()]), "head": nn.Linear(1, 1)})
    compiled = regions.compile_regions(net, backend="eager")
    for wrapped in (compiled, DistributedDataParallel(compiled)):
        assert extract_model_from_parallel(wrapped) is compiled
        assert extract_model_from_parallel(wrapped, keep_torch_compile=False) is net


def test_regions_are_compiled_under_mixed_precision():
    seen = []

    class Block(nn.Module):
        def forward(self, x):
            return x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 1)
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            seen.extend(type(block).__name__ for block in self.blocks)
            return self.linear(x)

    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", dynamo_plugin=plugin)
    model = Model()
    compiled = accelerator.prepare(model)
    assert compiled(torch.ones(1, 1)).dtype == torch.float32
    assert seen == ["OptimizedModule"] * 2
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model


@pytest.mark.cold
def test_asking_does_not_import_the_compiler():
    code = (
        "import sys, torch; from accelerate.utils import is_compiled_module, has_compiled_regions; "
        "m = torch.nn.Linear(1, 1); assert not is_compiled_module(m) and not has_compiled_regions(m); "
        "assert 'torch._dynamo.eval_frame' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
