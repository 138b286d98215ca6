"""The identity registry of prepared objects."""

import copy
import gc
import warnings

import pytest
from torch import nn

from accelerate.training import prepared
from accelerate.training.prepared import PreparedObjects


class AlwaysEqual(nn.Module):
    """A module whose ``==`` says yes to everything, as a tensor-like or mock object may."""

    def __eq__(self, other):
        return True

    __hash__ = nn.Module.__hash__


class Slotted:
    __slots__ = ()


def test_outer_and_inner_objects_are_found_by_identity():
    inner, outer, slotted = AlwaysEqual(), nn.Sequential(), Slotted()
    registry = PreparedObjects()
    entry = registry.record("model", outer, [inner])
    assert registry.find(outer) is entry and registry.find(inner) is entry
    assert registry.find(copy.deepcopy(inner)) is None
    assert registry.record("scheduler", slotted) is registry.find(slotted)
    registry.clear()
    assert registry.find(outer) is registry.find(inner) is None and list(registry.alive("model")) == []


def test_references_are_weak_and_a_reused_id_is_not_mistaken():
    registry = PreparedObjects()
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
    registry = PreparedObjects()
    registry.record("model", nn.Sequential(), [inner])  # the wrapper is dropped at once
    gc.collect()
    assert registry.find(inner) is None


def test_recording_again_replaces_the_entry():
    inner, first, second = nn.Linear(1, 1), nn.Sequential(), nn.Sequential()
    registry = PreparedObjects()
    registry.record("model", first, [inner], evaluation=True)
    entry = registry.record("model", second, [first, inner])
    assert registry.find(inner) is entry and registry.find(first) is entry
    assert [item is second for item in registry.alive("model")] == [True]


def test_another_live_registry_is_asked_and_a_dead_one_is_not():
    model = nn.Linear(1, 1)
    mine, other = PreparedObjects(), PreparedObjects()
    entry = other.record("model", model)
    assert prepared.find_elsewhere(mine, model) is entry
    del other, entry
    gc.collect()
    assert prepared.find_elsewhere(mine, model) is None


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda m: nn.Sequential(nn.Identity(), m), "its submodule '1' (Sequential)"),
        (lambda m: m[0], "it shares '0' (Linear) with the prepared Sequential"),
    ],
)
def test_a_shared_part_is_named(build, named):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    registry = PreparedObjects()
    registry.record("model", model)
    assert named in prepared.shared_part(registry, build(model))
    assert prepared.shared_part(registry, copy.deepcopy(model)) is None


def test_the_warning_points_at_the_callers_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared.warn_caller("message")
    assert caught[0].filename == __file__ and caught[0].category is UserWarning
