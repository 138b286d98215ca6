"""A small model with a tied weight, a buffer and a parameter without dims, and an optimizer whose order is not the model's."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.layer = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.arange(3))

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens)) * self.scale)


def job(seed=0, steps=2, width=4, kind=torch.optim.AdamW):
    """Return a model and its optimizer after some steps; equal ones for equal arguments."""
    torch.manual_seed(seed)
    model = Net(width)
    few, many = [model.layer.bias, model.scale], [model.layer.weight, model.embedding.weight]
    optimizer = kind([{"params": few, "lr": 0.1}, {"params": many, "lr": 0.2}])
    for _ in range(steps):
        model(torch.arange(7)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer
