"""The prepared optimizer."""

import pickle

import pytest
import torch

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer


def parameter(value=1.0):
    weight = torch.nn.Parameter(torch.full((1,), value))
    weight.grad = torch.ones(1)
    return weight


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def test_it_is_a_torch_optimizer_that_shows_the_inner_ones_state(accelerator):
    inner = torch.optim.AdamW([parameter()], lr=0.1)
    optimizer = accelerator.prepare(inner)
    assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, AcceleratedOptimizer)
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.add_param_group({"params": [parameter(2.0)]})
    assert len(inner.param_groups) == 2


def test_set_to_none_is_passed_on_or_refused(accelerator):
    weight = parameter()
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.5))
    optimizer.zero_grad(set_to_none=False)
    assert weight.grad.item() == 0

    class Old(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad()

    with pytest.raises(ValueError, match="set_to_none=True.*Old"):
        accelerator.prepare(Old([parameter()], lr=0.1)).zero_grad(set_to_none=True)


def test_a_scaler_assigned_later_works():
    accelerator = Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.5))
    optimizer.scaler = torch.amp.GradScaler("cpu")
    optimizer.scaler.scale((weight * float("nan")).sum()).backward()
    optimizer.step()
    assert optimizer.step_was_skipped


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_seen_and_the_schedule_waits(fused):
    """Torch calls the step of a fused optimizer all the same: it looks at the overflow itself."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    weight = torch.nn.Parameter(torch.ones(1))
    inner = torch.optim.Adam([weight], lr=0.5, fused=fused)
    optimizer, schedule = accelerator.prepare(inner, torch.optim.lr_scheduler.StepLR(inner, 1, 0.1))
    for value, skipped, rate in (1.0, False, 0.05), (float("inf"), True, 0.05), (1.0, False, 0.005):
        before = weight.item()
        accelerator.backward((weight * value).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert (optimizer.step_was_skipped, accelerator.optimizer_step_was_skipped) == (skipped, skipped)
        assert (weight.item() == before) is skipped and schedule.get_last_lr() == [pytest.approx(rate)]


def test_it_pickles_with_and_without_a_scaler():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    optimizer = accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5))
    restored = pickle.loads(pickle.dumps(optimizer))
    assert restored.param_groups[0]["lr"] == 0.5
    restored.param_groups[0]["params"][0].grad = torch.ones(1)
    restored.scaler = None
    restored.step()
    assert restored.param_groups[0]["params"][0].item() == 0.5


def test_closures_and_modes_reach_the_inner_optimizer(accelerator):
    calls, modal = [], torch.optim.SGD([parameter()], lr=0.1)
    modal.train, modal.eval = lambda: calls.append("train"), lambda: calls.append("eval")
    optimizer = accelerator.prepare(modal)
    optimizer.train(), optimizer.eval()
    optimizer.step(lambda: calls.append("closure"))
    assert calls == ["train", "eval", "closure"]
