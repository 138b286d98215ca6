"""Where modules go: what holds for every model, what is mended in comparison with 1.15.0, and what it costs."""

import logging
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import placement_samples as samples
from accelerate.offload.device_map import (
    check_device_map,
    clean_device_map,
    fallback_allocate,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from accelerate.offload.planner import make_plan
from accelerate.offload.tensors import (
    check_tied_parameters_on_same_device,
    compute_module_sizes,
    device_of,
    find_tied_parameters,
    get_max_layer_size,
    get_module_leaves,
    get_module_size_with_ties,
    retie_parameters,
)


class _Weights(nn.Module):
    """Parameters of one byte per element, by name; tensors are taken as they are."""

    def __init__(self, **weights):
        super().__init__()
        for name, weight in weights.items():
            setattr(self, name, _bytes(weight) if isinstance(weight, int) else weight)


def _bytes(count):
    return nn.Parameter(torch.zeros(count, dtype=torch.int8), requires_grad=False)


def _placed(model, budgets, **options):
    return infer_auto_device_map(model, budgets, clean_result=False, **options)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), confusing=st.booleans(), clean=st.booleans())
def test_what_holds_for_every_model(seed, confusing, clean):
    model = samples.model(seed, confusing)
    options = {**samples.arguments(seed, model), "clean_result": clean}
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            device_map = infer_auto_device_map(model, **options)
            check_device_map(model, device_map)
    finally:
        logging.disable(logging.NOTSET)
    sizes = compute_module_sizes(model, options["dtype"], options["special_dtypes"])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    used = {}
    for name in tensors:
        covering = [entry for entry in device_map if entry in ("", name) or name.startswith(f"{entry}.")]
        assert len(covering) == 1, name
        used[device_map[covering[0]]] = used.get(device_map[covering[0]], 0) + sizes.get(name, 0)
    budgets = get_max_memory(options["max_memory"])
    assert all(device == "disk" or size <= budgets[device] for device, size in used.items())
    together = {}
    for name, parameter in parameters.items():
        assert together.setdefault(id(parameter), device_of(name, device_map)) == device_of(name, device_map), name
    for name, module in model.named_modules():
        if name and type(module).__name__ in (options["no_split_module_classes"] or ()):
            inside = [f"{name}.{last}" for last in module.state_dict()]
            assert len({device_of(tensor, device_map) for tensor in inside}) <= 1, name


def test_buffers_of_a_module_that_is_split_go_where_the_rest_of_it_goes():
    block = _Weights(first=_Weights(w=30), second=_Weights(w=30))
    block.register_buffer("table", torch.zeros(2, dtype=torch.int8))
    model = nn.ModuleDict({"block": block, "last": _Weights(w=30)})
    placed = _placed(model, {"cpu": 64}, offload_buffers=True)
    assert placed == {"block.first": "cpu", "block.second": "disk", "last": "disk", "block.table": "cpu"}
    # Where that device is full they go to a later one that has a part of the module.
    assert _placed(model, {0: 0, 1: 31}, offload_buffers=True)["block.table"] == "disk"


def test_a_module_that_is_in_two_places_has_one_device():
    shared, norm, silent = _Weights(w=10), nn.BatchNorm1d(1, affine=False), nn.ReLU()
    model = nn.Sequential(shared, norm, silent, _Weights(w=50), shared, norm, silent, _Weights(w=50))
    device_map = _placed(model, {0: 90, "cpu": 50, "disk": 0})
    check_device_map(model, device_map)
    assert device_map["0"] == device_map["4"] == 0 and device_map["1"] == device_map["5"] == 0
    assert "2" in device_map and "6" not in device_map  # nothing of it can be on two devices
    block = _Weights(a=_Weights(w=20), b=_Weights(w=20))
    twice = nn.ModuleDict({"x": block, "y": block, "z": _Weights(w=20)})
    device_map = _placed(twice, {"cpu": 40})
    assert (device_map["y.a"], device_map["y.b"]) == (device_map["x.a"], device_map["x.b"]) == ("cpu", "disk")


def test_a_tied_parameter_that_a_split_module_holds_twice_has_a_device():
    shared, other = _bytes(8), _bytes(1)
    inner = _Weights(own=_bytes(5), other=other)
    model = nn.ModuleDict({"a": _Weights(x=shared), "b": _Weights(x=shared, other=other, again=shared, inner=inner)})
    for budget in range(2, 40):
        device_map = _placed(model, {"cpu": budget})
        check_device_map(model, device_map)
        assert device_of("b.again", device_map) == device_of("b.x", device_map)


def test_ties_of_tied_modules_are_followed_where_a_tie_would_break():
    one, two = _bytes(10), _bytes(10)
    model = nn.ModuleDict({"a": _Weights(u=one, w=10), "between": _Weights(w=100)})
    model.update({"b": _Weights(u=one, v=two, w=10), "c": _Weights(v=two, w=60)})
    device_map = _placed(model, {0: 0, 1: 60, 2: 200, "cpu": 0})
    assert device_map["a"] == device_map["b"] == device_map["c"] == 2


def test_a_name_inside_another_name_is_no_tie():
    shared = _bytes(10)
    model = nn.ModuleDict(
        {"m0": _Weights(w=40), "m1": _Weights(w=shared), "m2": nn.ModuleDict({"m0": _Weights(w=shared)})}
    )
    assert _placed(model, {0: 80, "cpu": 100})["m0"] == 0
    assert _placed(model, {0: 0, 1: 40, "cpu": 100}) == {"m0": 1, "m1": "cpu", "m2": "cpu"}


def test_the_reserve_is_that_of_what_still_waits():
    # The largest layer is on a device already when the next one is filled, so nothing is kept free for it.
    model = nn.Sequential(*(_Weights(w=size) for size in (50, 40, 10, 10)))
    plan = make_plan(model, {0: 90, "cpu": 50})
    assert plan.placed == {"0": 0, "1": "cpu", "2": "disk", "3": "disk"}
    assert plan.kept == {0: 10, "cpu": 10}


# --- cost ---


def _operations(call):
    """Count the bytecode operations of a call: a measure of its cost that is the same each time."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class _Block(nn.Module):
    def __init__(self, count=9):
        super().__init__()
        for number in range(count):
            self.add_module(f"l{number}", nn.Linear(4, 4 + number % 3, device="meta"))


def _blocks(count):
    return nn.ModuleDict({"layers": nn.ModuleList(_Block() for _ in range(count // 9)), "head": nn.Linear(4, 99)})


def _shrinking(count):
    # Each time a layer is placed, another one is the largest.
    return nn.Sequential(*(nn.Linear(1, 2 * count - number, device="meta") for number in range(count)))


def _tied_stacks(count):
    model = nn.ModuleDict({name: nn.ModuleList(_Block() for _ in range(count // 18)) for name in ("one", "two")})
    for one, two in zip(model["one"].children(), model["two"].children(), strict=True):
        for first, second in zip(one.children(), two.children(), strict=True):
            second.weight = first.weight
    return model


def _calls(model):
    """Everything that has to do with a placement, by name."""
    sizes, tied = compute_module_sizes(model), find_tied_parameters(model)
    total, children = sizes[""], list(model.named_children())
    names = [name for name, _ in model.named_modules() if name]
    leaves = [(name, model.get_submodule(name)) for name in get_module_leaves(dict.fromkeys(names, 0))]
    scattered = {name: number % 2 for number, name in enumerate(names)}
    budgets = {0: total // 3, 1: total // 4, "cpu": total // 4}
    others = [name for group in tied for name in group[1:]]
    return {
        "sizes": lambda: compute_module_sizes(model),
        "device map": lambda: infer_auto_device_map(model, budgets),
        "fallback": lambda: infer_auto_device_map(model, {0: 300, "cpu": total // 2}, fallback_allocation=True),
        "balanced": lambda: get_balanced_memory(model, budgets),
        "largest layer": lambda: get_max_layer_size(children, sizes, []),
        "find tied": lambda: find_tied_parameters(model),
        "check": lambda: check_device_map(model, scattered),
        "clean": lambda: clean_device_map(dict(scattered)),
        "check tied": lambda: check_tied_parameters_on_same_device(tied, {"": 0}),
        "tie again": lambda: retie_parameters(model, tied),
        "size with ties": lambda: get_module_size_with_ties(others, 0, sizes, leaves),
        "deeper": lambda: fallback_allocate(children, sizes, -1, [], tied),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [_blocks, _shrinking, _tied_stacks])
def test_four_times_the_modules_are_four_times_the_work(make, caplog, capsys):
    caplog.set_level(logging.CRITICAL)
    small, large = _calls(make(144)), _calls(make(4 * 144))
    grown = {name: _operations(large[name]) / _operations(small[name]) for name in small}
    assert all(factor < 4.4 for factor in grown.values()), grown
