"""A small model, inputs for each rank, and the gradients that plain torch computes on all of them at once."""

import torch
from torch import nn

WIDTH = 6


def network(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


def inputs_of(rank, count=2, seed=0):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank))


def mean_square(model, x):
    return model(x).pow(2).mean()


def whole_batch_gradients(accelerator, pieces):
    """Plain torch: the mean loss over pieces of equal size, in one process."""
    model = network().to(accelerator.device)
    mean_square(model, torch.cat(pieces).to(accelerator.device)).backward()
    return [parameter.grad for parameter in model.parameters()]


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_all_close(found, expected, **tolerance):
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))
