"""Where modules go: what holds for every model, what is fixed in comparison with 1.15.0, and what it costs."""

import logging
import warnings

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import placement_samples as samples
from accelerate.extensions.big_models.device_map import check_device_map, get_max_memory, infer_auto_device_map
from accelerate.extensions.big_models.planner import make_plan
from accelerate.extensions.big_models.tensors import compute_module_sizes, device_of


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
