"""The life of the loss scale in float16: overflow, skipped steps, backing off, growing.

Gradients in float16 underflow to zero below 6e-8 and overflow above 65504. The loss is multiplied by a scale before `backward`; the
prepared optimizer divides it out again, and skips its step where a gradient is infinite: the scale is halved then, and grows after
`growth_interval` good steps. `clip_grad_norm_` unscales first; to read gradients yourself call `unscale_gradients()`. Schedulers
that were prepared skip along. bfloat16 has the range of float32 and needs none of it.

    accelerate launch --cpu --num_processes 2 --mixed_precision fp16 examples/by_feature/scaler.py

Prints: overflow skipped the first steps on both ranks, then the scale fit and grew again: True
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs, set_seed


def main() -> None:
    # Far too large at first, and quick to grow, so that one epoch shows everything.
    handler = GradScalerKwargs(init_scale=2.0**24, growth_interval=10)
    accelerator = Accelerator(kwargs_handlers=[handler])
    set_seed(0)
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # weights stay float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=32, shuffle=True))

    scales, skipped = [], []
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        optimizer.zero_grad()
        scales.append(accelerator.scaler.get_scale())
    changes = [f"{scale:.0f}" for scale, before in zip(scales, [None, *scales], strict=False) if scale != before]
    accelerator.print(f"norm of the last step {norm:.2f}; scales in turn: {', '.join(changes)}")

    first = skipped.index(False)
    fits = first > 0 and any(
        scale > before for scale, before in zip(scales[first:], scales[first - 1 :], strict=False)
    )
    counts = accelerator.gather(torch.tensor([first], device=accelerator.device))
    shown = fits and len(set(counts.tolist())) == 1
    accelerator.print(f"overflow skipped the first steps on both ranks, then the scale fit and grew again: {shown}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
