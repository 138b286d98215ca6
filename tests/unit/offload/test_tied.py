"""Tied parameters."""

import logging

import pytest
import torch
from torch import nn

from accelerate.offload.tensors import (
    Company,
    Ties,
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    device_of,
    find_tied_parameters,
    get_module_size_with_ties,
    is_peft_model,
    name_and_parents,
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


def test_retie_leaves_a_group_without_data_alone():
    model = _tied()
    first, second = (nn.Parameter(torch.empty(2, 2, device="meta")) for _ in range(2))
    model["b"].weight, model["c"].weight = first, second
    retie_parameters(model, [["b.weight", "c.weight"]])
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


def test_a_tie_over_several_devices_warns(caplog):
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device([["b.weight", "c.weight"]], {"b": 0, "c": 0})
        assert not caplog.records
        check_tied_parameters_on_same_device([["b.weight", "c.weight"]], {"b": 0, "c": "cpu"})
    assert "Tied parameters are on different devices" in caplog.text


def test_many_ties_over_several_devices_warn_once(caplog):
    tied = [[f"a.{number}", f"b.{number}"] for number in range(12)]
    check_tied_parameters_on_same_device([*tied, ["a.x", "a.y"]], {"a": 0, "b": "disk"})
    (told,) = caplog.messages
    assert "{'a.0': 0, 'b.0': 'disk'}" in told and "a.4" in told and "a.5" not in told
    assert "and 7 more groups" in told
    with pytest.raises(ValueError, match="'c.0'"):
        check_tied_parameters_on_same_device([["a.0", "c.0"]], {"a": 0})


def test_size_with_ties_takes_the_first_holder_and_each_once():
    sizes, module = {"a": 10, "b": 14, "b.v": 3, "b.w": 6}, nn.Identity()
    waiting = [("c", module), ("b", module), ("b.w", module)]
    assert get_module_size_with_ties(["b.w", "b.v"], 10, sizes, waiting) == (18, ["b"], [module])
    assert get_module_size_with_ties(["x.*", "b"], 10, sizes, []) == (10, [], [])


def test_name_and_parents():
    assert list(name_and_parents("a.b.c")) == ["a.b.c", "a.b", "a"]
    assert list(name_and_parents("")) == []


class _Looked:
    """Where weights wait."""

    def __init__(self, **waiting):
        self.waiting, self.sizes = set(waiting), dict(waiting)

    def open(self, name, **pieces):
        self.waiting = (self.waiting - {name}) | {f"{name}.{last}" for last in pieces}
        self.sizes.update((f"{name}.{last}", size) for last, size in pieces.items())

    def holder(self, name):
        return next((part for part in name_and_parents(name) if part in self.waiting), None)


def test_company_follows_a_partner_that_is_opened():
    place = _Looked(b=10, c=10)
    ties = Ties([["a.u", "b.one.w"], ["a.v", "b.two.w", "c.w"]])
    company = Company("a", ties, place.sizes, place.holder)
    assert company.size == 20 and company.first_splittable(lambda name: False) == "b"
    place.open("b", one=3, two=4, three=3)
    company.opened("b")
    assert company.partners() == ["b.one", "b.two", "c"] and company.size == 17
    assert company.first_splittable(lambda name: name != "c") == "c"
    assert company.first_splittable(lambda name: True) is None


def test_company_follows_ties_of_partners_only_when_asked():
    place = _Looked(b=10, c=10)
    groups = [["a.u", "b.w"], ["b.v", "c.w"]]
    assert Company("a", Ties(groups), place.sizes, place.holder).partners() == ["b"]
    company = Company("a", Ties(groups, followed=True), place.sizes, place.holder)
    assert company.partners() == ["b", "c"]
    # Once b is open, the part that is tied to a has nothing to do with c.
    place.open("b", w=5, v=5)
    company.opened("b")
    assert company.partners() == ["b.w"] and company.size == 5


def test_settled_groups_ask_nothing():
    ties = Ties([["a.u", "b.w"]])
    ties.settled.add(0)
    assert Company("a", ties, {"b": 1}, lambda name: "b").partners() == []


def test_size_with_ties_counts_the_shared_weight_once_and_needs_no_waiting_partner():
    sizes = {"a": 10, "b": 14, "b.w": 6}
    module = nn.Identity()
    assert get_module_size_with_ties(["b.w"], 10, sizes, [("b", module)]) == (18, ["b"], [module])
    assert get_module_size_with_ties(["b.w"], 10, sizes, [("bb", module)]) == (10, [], [])


def test_other_libraries_models_declare_no_ties():
    assert check_tied_parameters_in_config(_tied()) is False
    assert is_peft_model(_tied()) is False
