"""Inference in a pipeline: each process has a stage of the model.

For a model that is too large for one device. `prepare_pippy` cuts it where the largest stage is smallest; the first process gives the
inputs, the last one gets the output, or all of them with `gather_output=True`. `pipeline_train.py` trains.

    accelerate launch --cpu --num_processes 2 examples/by_feature/pipeline.py

Prints: 2 stages, 1797 digits recognised as by the complete model in one process: True
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

from accelerate import PartialState, prepare_pippy
from accelerate.utils import set_seed


def main() -> None:
    state = PartialState()
    set_seed(0)  # the same weights on all processes
    pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    layers = [nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU()))).eval()
    whole = copy.deepcopy(model)

    model = prepare_pippy(model, example_args=(pixels[:256],), gather_output=True)  # micro-batches of 256
    with torch.no_grad():
        scores = model(pixels.to(state.device)).cpu()
        expected = whole(pixels)
    state.print(f"the second stage begins with {model.hf_split_points}")
    same = torch.allclose(scores, expected, atol=1e-6)
    if state.is_main_process:
        stages = state.num_processes
        print(f"{stages} stages, {len(scores)} digits recognised as by the complete model in one process: {same}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
