"""Tied parameters."""

import pytest
import torch
from torch import nn

from accelerate.offload.tensors import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    device_of,
    find_tied_parameters,
    get_module_size_with_ties,
    is_peft_model,
    retie_parameters,
)


def _tied():
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("c", "a", "b")})
    model["b"].weight = model["c"].weight
    return model


def test_groups_are_sorted_and_only_shared_names_are_in_them():
    assert find_tied_parameters(_tied()) == [["b.weight", "c.weight"]]
    assert find_tied_parameters(nn.Linear(2, 2)) == []


def test_retie_uses_the_name_that_holds_data():
    model = _tied()
    groups = find_tied_parameters(model)
    kept = model["c"].weight
    model["b"].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    retie_parameters(model, groups)
    assert model["b"].weight is kept
    first, second = (nn.Parameter(torch.empty(2, 2, device="meta")) for _ in range(2))
    model["b"].weight, model["c"].weight = first, second
    retie_parameters(model, groups)  # nothing to share yet
    assert model["b"].weight is first and model["c"].weight is second


def test_the_longest_entry_gives_the_device():
    device_map = {"": "disk", "a": 0, "a.b": 1}
    assert (device_of("a.b.w", device_map), device_of("a.c", device_map), device_of("ab", device_map)) == (
        1,
        0,
        "disk",
    )
    with pytest.raises(ValueError, match="'x.w'"):
        device_of("x.w", {"a": 0})


def test_many_ties_over_several_devices_warn_once(caplog):
    tied = [[f"a.{number}", f"b.{number}"] for number in range(12)]
    check_tied_parameters_on_same_device([*tied, ["a.x", "a.y"]], {"a": 0, "b": "disk"})
    (told,) = caplog.messages
    assert "{'a.0': 0, 'b.0': 'disk'}" in told and "a.4" in told and "a.5" not in told
    assert "and 7 more groups" in told
    caplog.clear()
    check_tied_parameters_on_same_device(tied, {"": 0})
    assert not caplog.messages
    with pytest.raises(ValueError, match="'c.0'"):
        check_tied_parameters_on_same_device([["a.0", "c.0"]], {"a": 0})


def test_size_with_ties_takes_the_first_holder_and_each_once():
    sizes, module = {"a": 10, "b": 14, "b.v": 3, "b.w": 6}, nn.Identity()
    waiting = [("c", module), ("b", module), ("b.w", module)]
    assert get_module_size_with_ties(["b.w", "b.v"], 10, sizes, waiting) == (18, ["b"], [module])
    assert get_module_size_with_ties(["x.*", "b"], 10, sizes, []) == (10, [], [])


def test_other_libraries_models_declare_no_ties():
    assert check_tied_parameters_in_config(_tied()) is False
    assert is_peft_model(_tied()) is False
