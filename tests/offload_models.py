"""Plain models with what makes offloading hard, each with inputs of several lengths."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_samples import Reference, Sample

WORDS, WIDTH = 17, 6


class Net(nn.Module):
    """Layers of 64, 72 and 100 bytes, one with buffers."""

    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x):
        return self.linear2(self.norm(self.linear1(x)))


class Block(nn.Module):
    """A block with a parameter and buffers of its own next to its layers."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("mask", (torch.arange(WIDTH) % 2).float(), persistent=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x * self.gain + self.shift * self.mask
        return x + self.layers(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Zoo(nn.Module):
    """Tied weights, a module under two names, one that is called twice, one that is not called, odd parameters."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.first = Block()
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.again = self.first
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def tie_weights(self):
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.twice(self.first(self.embedding(ids)))
        x = self.twice(self.again(x))[..., self.order] * self.scale
        return {"logits": self.head(x), "sum": x.sum(dim=1) + self.nothing.sum()}


class Branches(nn.Module):
    """Which layers run, and in which order, depends on the length of the input; one of them can fail."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, ids):
        x = self.embedding(ids)
        length = ids.shape[1]
        order = list(self.layers) if length % 2 else list(self.layers)[::-2]
        for layer in order:
            if length == 1 and layer is self.layers[2]:
                raise ArithmeticError("stopped half way")
            x = layer(x).tanh()
        return x


class Stack(nn.Module):
    """Tied biases and matrices deep in a stack of nested modules."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleDict({name: nn.ModuleList([Block(), nn.LayerNorm(WIDTH)]) for name in "ab"})
        self.tie_weights()

    def tie_weights(self):
        for name in ("weight", "bias"):
            setattr(self.blocks["b"][0].layers[0], name, getattr(self.blocks["a"][0].layers[0], name))

    def forward(self, ids):
        x = self.embedding(ids)
        for block, norm in self.blocks.values():
            x = norm(block(x))
        return x


class Recurrent(nn.Module):
    """Layers that look after their weights themselves: a list of those of all cells, and one computed from two others."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.cells = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.output = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, ids):
        return self.output(self.cells(self.embedding(ids))[0])


def ids(length: int, rows: int = 2) -> torch.Tensor:
    """Return token ids of shape (rows, length)."""
    return torch.arange(3, 3 + rows * length).reshape(rows, length) * 7 % WORDS


def batches(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return the inputs of five forwards."""
    return [{"ids": ids(length)} for length in (3, 8, 3, 6, 5)]


def _seeded(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind().eval()

    return make


MODELS = {kind.__name__.lower(): Sample(_seeded(kind), batches) for kind in (Zoo, Branches, Stack, Recurrent)}


class References:
    """Each of the models in each dtype, computed when it is first asked for.

    Args:
        folder: Where their files go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[Any, Reference] = {}

    def __call__(self, name: str, dtype: torch.dtype = torch.float32) -> Reference:
        if (name, dtype) not in self.made:
            self.made[name, dtype] = Reference(MODELS[name], dtype, self.folder / f"{name} {dtype}")
        return self.made[name, dtype]
