"""MS-AMP, recorded: what `msamp.initialize` is told, and that its results stand where the objects were."""

import sys
import types

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.config.enums import DistributedType
from accelerate.config.low_bit import MSAMPRecipeKwargs
from accelerate.precision import fp8


class FP8Linear(nn.Linear):
    pass


@pytest.fixture
def calls(monkeypatch):
    """A MS-AMP that makes a new optimizer, as the real one does."""
    noted = []

    def initialize(model, optimizer, opt_level):
        noted.append((model, optimizer, opt_level))
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = FP8Linear
        return model, torch.optim.SGD(model.parameters(), lr=optimizer.param_groups[0]["lr"])

    module = types.ModuleType("msamp")
    module.initialize = initialize
    monkeypatch.setitem(sys.modules, "msamp", module)
    return noted


@pytest.fixture
def run():
    made = Accelerator(cpu=True, mixed_precision="bf16")
    made.msamp_recipe_handler = MSAMPRecipeKwargs(opt_level="O1")
    return made


def pair():
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.25)


def test_the_second_time_what_was_made_stands_for_what_was_given(calls, run):
    model, optimizer = pair()
    first, made, last = fp8.prepare_msamp(run, (model, optimizer, 3), None)
    assert calls == [(model, optimizer, "O1")] and last == 3
    assert first is model and made is not optimizer and fp8.MSAMP().converted(first) == 1
    prepared = run.prepare(first, made)
    again = fp8.prepare_msamp(run, (model, optimizer), None)
    with pytest.warns(UserWarning, match="already prepared"):
        assert all(a is b for a, b in zip(run.prepare(*again), prepared, strict=True))
    assert len(calls) == 1


def test_it_needs_one_model_and_one_optimizer(calls, run):
    model, optimizer = pair()
    with pytest.raises(ValueError, match="1 models to train and 0 optimizers"):
        fp8.prepare_msamp(run, (model,), None)
    with pytest.raises(ValueError, match="2 models to train and 1 optimizers"):
        fp8.prepare_msamp(run, (model, optimizer, nn.Linear(1, 1)), None)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    assert fp8.prepare_msamp(run, (frozen,), None) == (frozen,) and not calls
    fp8.prepare_msamp(run, (model, frozen, optimizer), None)
    assert len(calls) == 1


def test_placement_of_the_model_can_be_refused(calls, run, monkeypatch):
    moved = []
    monkeypatch.setattr(nn.Module, "to", lambda self, device: moved.append(device) or self)
    fp8.prepare_msamp(run, pair(), [False, True])
    assert not moved
    fp8.prepare_msamp(run, pair(), [None, None])
    assert moved == [run.device]


def test_sharding_is_refused(calls):
    stand_in = types.SimpleNamespace(
        distributed_type=DistributedType.FSDP, prepared=types.SimpleNamespace(find=lambda item: None)
    )
    with pytest.raises(ValueError, match="distributed_type=FSDP.*AORecipeKwargs"):
        fp8.prepare_msamp(stand_in, pair(), None)
