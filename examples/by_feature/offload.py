"""Run a model that does not fit: some layers on the device, some in host memory, some on disk.

The model is built empty (`init_empty_weights`), and `load_checkpoint_and_dispatch` gives each module the place that `device_map` or
`max_memory` says. Weights visit the device for the forward of their layer, and a thread reads those that follow ahead. Here the device is
the CPU and half of the layers wait on disk.

    accelerate launch --cpu --num_processes 1 examples/by_feature/offload.py

Prints: 4 layers on the CPU, 4 on disk, same output as the complete model: True
"""

import pathlib

import torch
from torch import nn

from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import set_seed

LAYERS, WIDTH = 8, 256


class Block(nn.Module):
    """A residual block; all of it has to be on one device, which `no_split_module_classes` says."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + self.down(torch.relu(self.up(states)))


def build() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    folder = pathlib.Path("out/offload")
    whole = build()
    states = torch.randn(16, WIDTH)
    expected = whole(states)
    accelerator.save_model(whole, folder / "weights", max_shard_size="8MB")  # in several files, with an index
    size = sum(parameter.numel() * 4 for parameter in whole[0].parameters())

    with init_empty_weights():  # shapes, and no memory
        model = build()
    model = load_checkpoint_and_dispatch(
        model,
        folder / "weights",
        device_map="sequential",
        max_memory={"cpu": (LAYERS // 2 + 1) * size},  # room for one that visits; on a GPU also 0: "20GiB"
        offload_folder=folder / "offloaded",
        no_split_module_classes=["Block"],
    )
    places = list(model.hf_device_map.values())
    accelerator.print(model.hf_device_map)
    with torch.no_grad():
        same = torch.equal(model(states), expected)
    counts = places.count("cpu"), places.count("disk")
    accelerator.print(f"{counts[0]} layers on the CPU, {counts[1]} on disk, same output as the complete model: {same}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
