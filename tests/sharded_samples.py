"""A small model with a tied weight and a buffer, and a sharded run of one process, for the tests of the sharding strategies."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

BLOCKS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}


class Block(nn.Module):
    """Two layers around which the input is added, with dropout where it is requested."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 8)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.b(torch.relu(self.a(x))))


class Net(nn.Module):
    """An embedding, two blocks, and a head that shares the embedding's weight if they are tied."""

    def __init__(self, dropout: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.scale


def batch(seed: int = 1) -> torch.Tensor:
    """Return tokens (4, 5)."""
    return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of a model on tokens."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def net(seed: int = 0, **options: Any) -> Net:
    """Return a model with weights of a seed."""
    torch.manual_seed(seed)
    return Net(**options)


def sharding(version: int, /, accelerator: dict[str, Any] | None = None, **options: Any) -> Accelerator:
    """Return an Accelerator on the CPU that shards blocks; `options` are the plugin's."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **{**BLOCKS, **options})
    return Accelerator(cpu=True, fsdp_plugin=plugin, **(accelerator or {}))


@contextlib.contextmanager
def fake_group(rank: int, size: int) -> Iterator[None]:
    """Make a group of which only this process is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    yield
    torch.distributed.destroy_process_group()


class Machine:
    """Stands for an Accelerator on the CPU, with a mesh of the sizes that are given."""

    def __init__(self, **sizes: Any) -> None:
        self.device = torch.device("cpu")
        self.parallelism_config = ParallelismConfig(**sizes) if sizes else None
        self.torch_device_mesh = self.parallelism_config.get_device_mesh("cpu") if sizes else None
