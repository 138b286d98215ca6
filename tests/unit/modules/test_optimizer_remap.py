"""Optimizers follow parameters that were replaced: by name, through several replacements, into flat parameters, or not at all."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accelerate.modules.optimizer_remap import MovedParameters, named, remap_optimizers


def parameters(count):
    return [nn.Parameter(torch.full((2,), float(number))) for number in range(count)]


def held(optimizer):
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


@pytest.fixture
def moved():
    return MovedParameters()


def test_replacements_chain(moved):
    first, second, third = parameters(3)
    assert moved.resolve(first) is first and not moved.follow(torch.optim.SGD([first]))
    moved.record("w", first, second)
    moved.record("w", second, third)
    assert moved.resolve(first) is third
    optimizer = torch.optim.SGD([first])
    assert moved.follow(optimizer)
    assert held(optimizer) == [[id(third)]]
    assert not moved.follow(optimizer)
    moved.clear()
    assert moved.resolve(first) is first


def test_an_optimizer_that_stepped_is_refused_and_nothing_changes(moved):
    old, new = parameters(2), parameters(2)
    optimizer = torch.optim.Adam(old)
    old[1].grad = torch.ones(2)
    optimizer.step()
    for name, pair in zip(("first", "second"), zip(old, new, strict=True), strict=True):
        moved.record(name, *pair)
    before = held(optimizer)
    with pytest.raises(ValueError, match=r"Adam\) has a state for 'second'.*before the first step"):
        moved.follow(optimizer)
    assert held(optimizer) == before


def test_old_parameters_are_not_kept_alive(moved):
    old, new = parameters(2)
    moved.record("w", old, new)
    del old
    gc.collect()
    assert len(moved._new) == 0


def test_a_refusal_leaves_the_replacements_known():
    model = nn.Linear(2, 2)
    stepped, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    stepped.step()
    before, optimizers = named(model), [SimpleNamespace(optimizer=optimizer) for optimizer in (stepped, fresh)]
    owner = SimpleNamespace(prepared=SimpleNamespace(moved=MovedParameters()), _optimizers=optimizers)
    model.weight = nn.Parameter(model.weight.detach().clone())
    with pytest.raises(ValueError, match="has a state"):
        remap_optimizers(owner, model, before)
    assert owner.prepared.moved.resolve(before["weight"]) is model.weight
