"""Load a model in 8 and in 4 bits: how much memory it takes, and how far its output is from that of 16 bits.

`load_and_quantize_model` replaces the linear layers by those of bitsandbytes and quantises their weights while it loads them; the last
layer stays. The model is built empty, so it is never in memory unquantised. Quantised weights do not train: train adapters on them
(`examples/by_feature/qlora.py`). It runs on a CPU as well, and needs `pip install bitsandbytes`.

    accelerate launch --cpu --num_processes 1 examples/by_feature/quantise.py

Prints: 8 bits take half of the memory of bfloat16, 4 bits less than a third, the error is below 1 % and 5 %: True
"""

import argparse
import pathlib
import time

import torch
from torch import nn

from accelerate import Accelerator, init_empty_weights, load_checkpoint_in_model
from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model, set_seed

LAYERS = 4


def build(width: int) -> nn.Sequential:
    blocks = [(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(LAYERS)]
    return nn.Sequential(*(each for block in blocks for each in block), nn.Linear(width, 16))


@torch.no_grad()
def forward_ms(model: nn.Module, states: torch.Tensor) -> float:
    """Return the milliseconds of the fastest of five forwards."""
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        model(states)
        taken.append(time.perf_counter() - begun)
    return min(taken) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    width = parser.parse_args().width
    accelerator = Accelerator()
    set_seed(0)
    folder = pathlib.Path("out/quantise")
    accelerator.save_model(build(width), folder)
    states = torch.randn(64, width, dtype=torch.bfloat16, device=accelerator.device)
    reference = build(width)
    load_checkpoint_in_model(reference, folder)
    models, loads = {"bfloat16": reference.to(accelerator.device, torch.bfloat16).eval()}, {}
    settings = {
        "8 bits": BnbQuantizationConfig(load_in_8bit=True, torch_dtype=torch.bfloat16),
        "4 bits": BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16"),
    }
    for name, config in settings.items():
        with init_empty_weights():  # shapes, and no memory
            empty = build(width)
        begun = time.perf_counter()
        models[name] = load_and_quantize_model(empty, config, weights_location=folder, device_map="auto").eval()
        loads[name] = time.perf_counter() - begun

    sizes, errors = {}, {}
    with torch.no_grad():
        expected = reference(states).float()
        for name, model in models.items():
            sizes[name] = sum(each.nbytes for each in model.parameters()) / 2**20
            output = model(states).float()
            errors[name] = ((output - expected).norm() / expected.norm()).item()
            accelerator.print(
                f"{name:9} weights {sizes[name]:6.2f} MiB, loaded in {loads.get(name, 0):.2f} s, forward of 1 row "
                f"{forward_ms(model, states[:1]):.1f} ms, of 64 rows {forward_ms(model, states):.1f} ms, "
                f"error of the output {errors[name]:.1%}"
            )
    smaller = sizes["8 bits"] < 0.51 * sizes["bfloat16"] and sizes["4 bits"] < sizes["bfloat16"] / 3
    near = errors["8 bits"] < 0.01 and errors["4 bits"] < 0.05
    accelerator.print(
        "8 bits take half of the memory of bfloat16, 4 bits less than a third, the error is below 1 % and 5 %: "
        f"{smaller and near}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
