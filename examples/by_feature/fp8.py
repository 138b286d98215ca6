"""8-bit floating point: which layers torchao converts, and what it does to the losses.

`mixed_precision="fp8"` with `AORecipeKwargs` makes the linear layers but the first and the last compute in 8 bits; the rest computes in
bfloat16. It pays on GPUs of compute capability 8.9 or higher. On a CPU the numbers are those of 8 bits and the cost is that of the full
computation, which is enough to try a recipe on a small model. It needs `pip install torchao`.

    accelerate launch --cpu --num_processes 2 examples/by_feature/fp8.py

Prints: 2 of 4 linear layers compute in 8 bits, losses within 5 % of bfloat16's and not equal to them: True
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import AORecipeKwargs, set_seed


def train(precision: str) -> tuple[list[float], list[str]]:
    """Train an epoch; return the mean loss of each step and the classes of the linear layers. Collective: call on every rank."""
    AcceleratorState._reset_state(reset_partial_state=False)
    recipe = [AORecipeKwargs()] if precision == "fp8" else []
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=recipe)
    set_seed(0)
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    # Sides of the layers are multiples of 16: others stay as they are.
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=32, drop_last=True))
    losses = []
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    linear = [type(each).__name__ for each in accelerator.unwrap_model(model) if isinstance(each, nn.Linear)]
    accelerator.print(f"{precision}: {linear}, losses {losses[0]:.3f} ... {losses[-1]:.3f}")
    accelerator.free_memory()
    return losses, linear


def main() -> None:
    expected, _ = train("bf16")
    found, linear = train("fp8")
    converted = sum(name != "Linear" for name in linear)
    close = all(abs(ours - theirs) < 0.05 * theirs for ours, theirs in zip(found, expected, strict=True))
    accelerator = Accelerator()
    accelerator.print(
        f"{converted} of {len(linear)} linear layers compute in 8 bits, losses within 5 % of bfloat16's and not equal "
        f"to them: {close and found != expected}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
