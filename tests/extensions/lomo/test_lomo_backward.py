import pytest
import torch
from torch import nn

from accelerate import Accelerator


class Fused(torch.optim.Optimizer):
    """Updates weights in its backward pass as LOMO's optimizers do, and has no `step`."""

    def fused_backward(self, loss, rate):
        loss.backward()
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(rate * parameter.grad)
            parameter.grad = None


def test_an_optimizer_that_steps_in_its_backward_pass_is_driven_by_it(monkeypatch):
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1)
    before = model.weight.detach().clone()
    _, optimizer = accelerator.prepare(model, Fused(model.parameters(), {}))
    with pytest.raises(ValueError, match="learning_rate"):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.backward(model(torch.ones(1, 2)).sum(), learning_rate=0.5)
    optimizer.step()
    torch.testing.assert_close(before - model.weight, torch.full((1, 2), 0.5))
    monkeypatch.setattr(accelerator.state, "num_processes", 2)
    with pytest.raises(NotImplementedError, match="2 processes would train different models"):
        accelerator.prepare(Fused(model.parameters(), {}))
