"""Optimizers follow parameters that were replaced: by name, through several replacements, into flat parameters, or not at all."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accelerate.modules.repoint import MovedParameters, named, repoint


def parameters(count):
    return [nn.Parameter(torch.full((2,), float(number))) for number in range(count)]


def replace(model, keep=()):
    """Put new parameters in the place of a model's, ties kept, and return them by name."""
    made = {}
    for name, old in list(model.named_parameters(remove_duplicate=False)):
        parent, _, child = name.rpartition(".")
        if name not in keep:
            new = made.setdefault(id(old), nn.Parameter(old.detach().clone()))
            setattr(model.get_submodule(parent), child, new)
    return dict(model.named_parameters())


def held(optimizer):
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def accelerator(*optimizers):
    return SimpleNamespace(
        prepared=SimpleNamespace(
            moved=MovedParameters(), optimizers=[SimpleNamespace(optimizer=optimizer) for optimizer in optimizers]
        )
    )


@pytest.fixture
def moved():
    return MovedParameters()


def test_replacements_chain(moved):
    first, second, third = parameters(3)
    assert moved.now(first) is first and not moved.follow(torch.optim.SGD([first]))
    moved.record("w", first, second)
    moved.record("w", second, third)
    assert moved.now(first) is third
    optimizer = torch.optim.SGD([first])
    assert moved.follow(optimizer)
    assert held(optimizer) == [[id(third)]]
    assert not moved.follow(optimizer)
    moved.clear()
    assert moved.now(first) is first


def test_groups_keep_their_order_and_options(moved):
    old, new = parameters(4), parameters(4)
    optimizer = torch.optim.SGD([{"params": old[:1], "lr": 1.0}, {"params": old[1:], "lr": 2.0}])
    for number in (0, 2, 3):
        moved.record(str(number), old[number], new[number])
    moved.follow(optimizer)
    assert held(optimizer) == [[id(new[0])], [id(old[1]), id(new[2]), id(new[3])]]
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 2.0]


def test_a_flat_parameter_takes_the_place_of_all_its_members_once(moved):
    old, (flat,) = parameters(3), parameters(1)
    for number, parameter in enumerate(old):
        moved.record(str(number), parameter, flat)
    optimizer = torch.optim.SGD(old)
    moved.follow(optimizer)
    assert held(optimizer) == [[id(flat)]]


def test_a_part_of_a_flat_parameter_is_refused_and_nothing_changes(moved):
    old, (other, flat) = parameters(3), parameters(2)
    moved.record("other", old[0], other)
    moved.record("layer.weight", old[1], flat)
    moved.record("layer.bias", old[2], flat)
    optimizer = torch.optim.SGD([{"params": old[:2]}, {"params": old[2:]}])
    before = held(optimizer)
    with pytest.raises(ValueError, match=r"Group 0 .* has 1 of the 2 .*'layer.weight'.*use_orig_params=True"):
        moved.follow(optimizer)
    assert held(optimizer) == before


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


def test_names_are_the_users():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert list(named(torch.compile(model))) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert named(model)["1.weight"] is named(model)["0.weight"]


def test_prepared_optimizers_follow_and_later_ones_can():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    prepared, later = torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())
    owner, before = accelerator(prepared), named(model)
    now = replace(model, keep=("1.bias",))
    repoint(owner, model, before)
    wanted = [[id(now["0.weight"]), id(now["0.bias"]), id(before["1.bias"])]]
    assert held(prepared) == wanted
    assert owner.prepared.moved.follow(later)
    assert held(later) == wanted


def test_a_refusal_leaves_the_replacements_known():
    model = nn.Linear(2, 2)
    stepped, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    stepped.step()
    owner, before = accelerator(stepped, fresh), named(model)
    replace(model)
    with pytest.raises(ValueError, match="has a state"):
        repoint(owner, model, before)
    assert owner.prepared.moved.now(before["weight"]) is model.weight
