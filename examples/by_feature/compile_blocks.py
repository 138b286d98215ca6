"""Compile the repeated block of a model once instead of the complete model.

`torch.compile` takes as long as the model has layers. With `use_regional_compilation` each kind of block is compiled once and its code
serves all layers. Here "aot_eager" is the backend, which needs no C++ compiler; for speed choose "inductor". The launcher
takes the same: `--dynamo_backend inductor --dynamo_use_regional_compilation`. `unwrap_model(model, keep_torch_compile=False)` and
checkpoints have the names of the model as it was.

    accelerate launch --cpu --num_processes 2 examples/by_feature/compile_blocks.py

Prints: 4 blocks compiled as one, losses equal those of the uncompiled model: True
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin, is_compiled_module, set_seed

LAYERS = 4


class Block(nn.Module):
    """A residual layer; all of them have the same shapes, so one compilation serves them all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + self.layers(states)


class Net(nn.Module):
    """Pixels in, ten logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(LAYERS))
        self.head = nn.Linear(64, 10)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            states = block(states)
        return self.head(states)


def train(model: nn.Module, loader: DataLoader, accelerator: Accelerator | None = None) -> tuple[torch.Tensor, int]:
    """Train five steps; return their losses and how many blocks were compiled."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach() if accelerator is None else accelerator.reduce(loss.detach(), "mean"))
    blocks = model.blocks if accelerator is None else accelerator.unwrap_model(model).blocks
    return torch.stack(losses).cpu(), sum(is_compiled_module(block) for block in blocks)


def main() -> None:
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True))
    set_seed(0)
    digits, batch = load_digits(), 64
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32)[: 5 * batch] / 16, torch.tensor(digits.target)
    rows = TensorDataset(pixels, labels[: 5 * batch])
    model = Net()
    expected, _ = train(copy.deepcopy(model), DataLoader(rows, batch_size=batch))
    found, compiled = train(model, DataLoader(rows, batch_size=batch // accelerator.num_processes), accelerator)
    same = torch.allclose(found, expected, atol=1e-4)
    accelerator.print(f"losses {[round(loss, 4) for loss in found.tolist()]}")
    accelerator.print(f"{compiled} blocks compiled as one, losses equal those of the uncompiled model: {same}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
