"""Steps that are computed twice, on one process; what several ranks do is in check_replay.py."""

import copy
import itertools

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.training.replay import ReplayDiffers
from cases import cases


def prepared(monkeypatch, every, model=None):
    monkeypatch.setenv("ACCELERATE_REPLAY_EVERY", every)
    accelerator = Accelerator(cpu=True)
    model = model or nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def learn(accelerator, model, optimizer, steps=1):
    for _ in range(steps):
        accelerator.backward(model(torch.ones(3, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()


class Wavering(nn.Module):
    """Adds a number that no state holds."""

    def __init__(self):
        super().__init__()
        self.layer, self.numbers = nn.Linear(2, 1), itertools.count()

    def forward(self, x):
        return self.layer(x) + next(self.numbers)


def test_without_the_variable_nothing_is_watched(monkeypatch):
    for every in ("", "0"):
        accelerator, model, optimizer = prepared(monkeypatch, every)
        assert not model._forward_hooks and optimizer._before_step is None and "backward" not in vars(accelerator)
    monkeypatch.setenv("ACCELERATE_REPLAY_EVERY", "often")
    with pytest.raises(ValueError, match="ACCELERATE_REPLAY_EVERY is 'often'"):
        Accelerator(cpu=True)


def test_a_forward_that_is_not_repeated_is_named_in_the_step_that_is_computed_twice(monkeypatch):
    accelerator, model, optimizer = prepared(monkeypatch, "3", Wavering())
    learn(accelerator, model, optimizer, steps=2)
    accelerator.backward(model(torch.ones(3, 2)).sum())
    with pytest.raises(ReplayDiffers, match="Step 3 of SGD.*on rank 0:\n  - rank 0: 1 of 3 tensors, first output 0\n"):
        optimizer.step()


def test_models_are_let_go_of_and_copied(monkeypatch):
    accelerator, model, optimizer = prepared(monkeypatch, "1")
    learn(accelerator, model, optimizer, steps=2)
    twin = copy.deepcopy(model)
    assert twin(torch.ones(1, 2)).requires_grad
    accelerator.free_memory()
    model(torch.ones(1, 2))
    assert not accelerator._replay_check._passes


def test_a_step_of_which_nothing_is_computed_twice_is_said_once(monkeypatch):
    accelerator, model, optimizer = prepared(monkeypatch, "1")
    with pytest.warns(UserWarning, match="no output of a prepared model got a gradient through") as caught:
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    assert len(caught) == 1


def test_an_optimizer_that_steps_in_backward_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_REPLAY_EVERY", "1")
    model = nn.Linear(1, 1)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="ACCELERATE_REPLAY_EVERY=1 with SGD, which updates weights in backward"):
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@cases(
    "options, words",
    (lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()}, "fsdp_version=1"),
)
def test_where_it_has_no_effect_it_is_said(monkeypatch, options, words):
    monkeypatch.setenv("ACCELERATE_REPLAY_EVERY", "1")
    with pytest.warns(UserWarning, match=f"ACCELERATE_REPLAY_EVERY=1 has no effect with {words}"):
        Accelerator(cpu=True, **options())
