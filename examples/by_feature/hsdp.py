"""HSDP: replicas of a model that is sharded within each replica, four ranks as 2 x 2.

FSDP2 shards parameters, gradients and optimizer state over the ranks of one replica, which gather each block when it is needed; ranks
with the same shard in different replicas average its gradients. Shards stay within a machine, replicas go over machines:
`dp_replicate_size` is the outer dimension. The curve equals that of one process with the global batch.

    accelerate launch --cpu --num_processes 4 examples/by_feature/hsdp.py

Prints: 2 replicas of 2 shards, half of the parameters on each rank, same curve as one process: True
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import set_seed

BATCH, STEPS = 64, 8


class Block(nn.Module):
    """A residual layer: what is gathered for its forward, and freed after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + self.layers(states)


def train(model: nn.Module, loader: DataLoader, accelerator: Accelerator | None = None) -> torch.Tensor:
    """Train, on one process or with an Accelerator, and return the loss of each step."""
    if accelerator is not None:
        model, loader = accelerator.prepare(model, loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if accelerator is not None:
        optimizer = accelerator.prepare(optimizer)
        shards = [parameter.to_local().numel() for parameter in model.parameters()]
        whole = sum(parameter.numel() for parameter in model.parameters())
        accelerator.print(f"rank 0 holds {sum(shards)} of {whole} parameters")
        assert sum(shards) <= whole // 2 + 64
    losses = []
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach() if accelerator is None else accelerator.reduce(loss.detach(), "mean"))
    return torch.stack(losses).cpu()


def main() -> None:
    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=mesh)
    set_seed(0)
    digits, kept = load_digits(), BATCH * STEPS
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    rows = TensorDataset(pixels[:kept], labels[:kept])
    model = nn.Sequential(Block(64), Block(64), nn.Linear(64, 10))
    expected = train(copy.deepcopy(model), DataLoader(rows, batch_size=BATCH))
    found = train(model, DataLoader(rows, batch_size=BATCH // accelerator.num_processes), accelerator)
    accelerator.print(
        f"mesh {accelerator.torch_device_mesh}; last loss {found[-1]:.4f}, in one process {expected[-1]:.4f}"
    )
    same = torch.allclose(found, expected, atol=1e-3)
    accelerator.print(
        f"2 replicas of 2 shards, half of the parameters on each rank, same curve as one process: {same}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
