"""LOMO, whose optimizers update weights in their backward pass; AdaLomo asks for a GPU when it is made."""

import pytest
import torch

from accelerate import Accelerator

pytestmark = pytest.mark.interop
RATE = 1e-2


def losses(train_on):
    """Train on ten batches; `train_on` prepares a model and its optimizer, and returns a function of a loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    learn, found = train_on(model), []
    for _ in range(10):
        loss = (model(torch.randn(4, 6)) - 1).pow(2).mean()
        learn(loss)
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", ["backward", "lomo_backward"])
def test_backward_updates_as_the_optimizer_alone_does(name):
    lomo = pytest.importorskip("lomo_optim")

    def prepared(model):
        accelerator = Accelerator(cpu=True)
        _, optimizer = accelerator.prepare(model, lomo.Lomo(model, lr=RATE))
        assert accelerator.has_lomo_optimizer
        with pytest.raises(ValueError, match="learning_rate"):
            accelerator.backward(torch.ones(1, requires_grad=True).sum())

        def learn(loss):
            getattr(accelerator, name)(loss, learning_rate=RATE)
            optimizer.step()
            optimizer.zero_grad()

        return learn

    def alone(model):
        optimizer = lomo.Lomo(model, lr=RATE)
        return lambda loss: optimizer.fused_backward(loss, RATE)

    assert losses(prepared) == losses(alone)
