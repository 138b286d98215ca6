"""The identity registry of prepared objects."""

import copy
import gc

from torch import nn

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


def test_an_inner_object_outlived_by_nothing_is_forgotten_with_its_wrapper():
    inner = nn.Linear(1, 1)
    registry = PreparedObjects()
    registry.record("model", nn.Sequential(), [inner])  # the wrapper is dropped at once
    gc.collect()
    assert registry.find(inner) is None
