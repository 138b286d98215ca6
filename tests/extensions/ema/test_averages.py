"""A moving average of weights on one process: skipped steps, several optimizers, weights that have no gradient."""

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_does_not_count(fused):
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[GradScalerKwargs(init_scale=2.0)])
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused))
    ema = accelerator.ema(model, decay=0.5)

    def step(factor):
        accelerator.backward(model(torch.ones(1, 2)).sum() * factor)
        optimizer.step()
        optimizer.zero_grad()
        with ema.applied():
            return model.weight.detach().clone()

    step(1.0)
    second = step(1.0)
    third = step(float("inf"))
    assert accelerator.optimizer_step_was_skipped and torch.equal(second, third)
    assert not torch.equal(second, model.weight)


def test_parts_of_several_optimizers_and_weights_that_never_have_a_gradient():
    accelerator, model = Accelerator(cpu=True), nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3)])
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.1) for part in model]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    ema = accelerator.ema(model, decay=0.5)
    seen = []
    for _ in range(3):
        sum(part(torch.ones(1, 1)).sum() for part in model[:2]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append([part.weight.item() for part in model])
    with ema.applied():
        for number, part in enumerate(model):
            first, second, third = (weights[number] for weights in seen)
            assert part.weight.item() == pytest.approx(first / 4 + second / 4 + third / 2, abs=1e-6)
    assert [part.weight.item() for part in model] == seen[-1] and seen[0][2] == seen[-1][2]


def test_averages_are_applied_once_at_a_time():
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ema = accelerator.ema(model, decay=0.5)
    with ema.applied():
        with pytest.raises(RuntimeError, match="entered inside itself"), ema.applied():
            pass
        assert ema.is_applied


def test_an_average_ends_with_what_was_prepared():
    """Else a second one of the same model would average each step twice."""
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        accelerator.free_memory()
        _, prepared = accelerator.prepare(model, optimizer)
        ema = accelerator.ema(model, decay=0.5)
        optimizer.state.clear()
    weights = []
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        prepared.step()
        prepared.zero_grad()
        weights.append(model.weight.item())
    with ema.applied():
        assert model.weight.item() == pytest.approx(sum(weights) / 2)


def test_a_module_with_a_method_of_that_name_is_left_alone():
    class Own(nn.Linear):
        def reshard(self):
            raise AssertionError("it is the user's")

    accelerator, model = Accelerator(cpu=True), Own(1, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.ema(model).applied():
        pass


def test_refusals():
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for decay in (0, 1.0):
        with pytest.raises(ValueError, match=f"decay is {decay}"):
            accelerator.ema(model, decay)
    accelerator.ema(model)
    with pytest.raises(ValueError, match="called before for a part of this model"):
        accelerator.ema(model)
