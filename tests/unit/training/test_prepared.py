"""The identity registry of prepared objects."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

from accelerate.training import prepared
from accelerate.training.prepared import PreparedRegistry


class AlwaysEqual(nn.Module):
    """A module whose ``==`` says yes to everything, as a tensor-like or mock object may."""

    def __eq__(self, other):
        return True

    __hash__ = nn.Module.__hash__


def test_outer_and_inner_objects_are_found_by_identity():
    inner, outer = nn.Linear(1, 1), nn.Sequential()
    registry = PreparedRegistry()
    entry = registry.record("model", outer, [inner])
    assert registry.find(outer) is entry and registry.find(inner) is entry
    assert registry.find(copy.deepcopy(inner)) is None


def test_equality_does_not_make_two_objects_one():
    registry = PreparedRegistry()
    registry.record("model", AlwaysEqual())
    assert registry.find(AlwaysEqual()) is None


def test_references_are_weak_and_a_reused_id_is_not_mistaken():
    registry = PreparedRegistry()
    model = nn.Linear(1, 1)
    registry.record("model", model)
    number = id(model)
    del model
    gc.collect()
    impostor = nn.Linear(1, 1)
    registry._by_id[id(impostor)] = registry._by_id.pop(number)
    assert registry.find(impostor) is None


def test_an_inner_object_outlived_by_nothing_is_forgotten_with_its_wrapper():
    inner = nn.Linear(1, 1)
    registry = PreparedRegistry()
    registry.record("model", nn.Sequential(), [inner])  # the wrapper is dropped at once
    gc.collect()
    assert registry.find(inner) is None


def test_recording_again_replaces_the_entry():
    inner, first, second = nn.Linear(1, 1), nn.Sequential(), nn.Sequential()
    registry = PreparedRegistry()
    registry.record("model", first, [inner], evaluation=True)
    entry = registry.record("model", second, [first, inner])
    assert registry.find(inner) is entry and registry.find(first) is entry
    assert [item is second for item in registry.alive("model")] == [True]


def test_clear_makes_every_object_new():
    model = nn.Linear(1, 1)
    registry = PreparedRegistry()
    registry.record("model", model)
    registry.clear()
    assert registry.find(model) is None


def test_another_live_registry_is_asked_and_a_dead_one_is_not():
    model = nn.Linear(1, 1)
    mine, other = PreparedRegistry(), PreparedRegistry()
    entry = other.record("model", model)
    assert prepared.find_elsewhere(mine, model) is entry
    del other, entry
    gc.collect()
    assert prepared.find_elsewhere(mine, model) is None


def test_objects_with_slots_are_registered_too():
    class Slotted:
        __slots__ = ()

    item = Slotted()
    registry = PreparedRegistry()
    entry = registry.record("scheduler", item)
    assert registry.find(item) is entry


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda m: nn.Sequential(nn.Identity(), m), "its submodule '1' (Sequential)"),
        (lambda m: m[0], "it shares '0' (Linear) with the prepared Sequential"),
    ],
)
def test_a_shared_part_is_named(build, named):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    registry = PreparedRegistry()
    registry.record("model", model)
    assert named in prepared.shared_part(registry, build(model))
    assert prepared.shared_part(registry, copy.deepcopy(model)) is None


def test_the_warning_points_at_the_callers_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared.warn_caller("message")
    assert caught[0].filename == __file__ and caught[0].category is UserWarning


def test_registry_holds_optimizers_and_loaders():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    loader = torch.utils.data.DataLoader([1])
    registry = PreparedRegistry()
    for kind, item in (("optimizer", optimizer), ("loader", loader)):
        assert registry.record(kind, item) is registry.find(item)
    assert list(registry.alive("model")) == []
