"""A small denoising model: it removes noise step by step until digits are left.

The loop is that of a diffusion model: each picture gets a random amount of noise, the model says what the noise was, and an average of
the weights over the steps is kept next to those that train. The average is registered, so a checkpoint has it. At the end the average
draws pictures from noise alone, each rank a part of them.

    accelerate launch --cpu --num_processes 2 examples/denoise.py

Prints: error below half of that of no prediction, 64 drawn pictures are nearer to digits than noise, averages equal on 2 ranks: True
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

LEVELS, EPOCHS, DRAWN = 40, 30, 64
KEPT = (
    torch.cos(torch.linspace(0.02, 0.98, LEVELS) * torch.pi / 2) ** 2
)  # the share of the picture at each level of noise


class Denoiser(nn.Module):
    """Says which noise is in a picture of 64 pixels, given its level."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.level = nn.Embedding(LEVELS, width)
        self.enter, self.leave = nn.Linear(64, width), nn.Linear(width, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(3)
        )

    def forward(self, noisy: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        states = self.enter(noisy) + self.level(level)
        for layer in self.layers:
            states = states + layer(states)
        return self.leave(states)


@torch.no_grad()
def draw(model: nn.Module, pictures: torch.Tensor) -> torch.Tensor:
    """Take the noise out of pictures that are noise alone, from the highest level to the lowest."""
    kept = KEPT.to(pictures.device)
    for level in reversed(range(LEVELS)):
        noise = model(pictures, torch.full((len(pictures),), level, device=pictures.device))
        clean = ((pictures - (1 - kept[level]).sqrt() * noise) / kept[level].sqrt()).clamp(-1, 1)
        pictures = kept[level - 1].sqrt() * clean + (1 - kept[level - 1]).sqrt() * noise if level else clean
    return pictures


def distance(pictures: torch.Tensor, digits: torch.Tensor) -> float:
    """Return the mean distance of pictures from the nearest digit."""
    return torch.cdist(pictures, digits).amin(dim=1).mean().item()


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    model, kept = Denoiser(), KEPT.to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(digits, batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    average = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.99))
    accelerator.register_for_checkpointing(average)
    set_seed(0, device_specific=True)  # each rank draws noise of its own

    for epoch in range(EPOCHS):
        errors = []
        for pictures in loader:
            level = torch.randint(LEVELS, (len(pictures),), device=accelerator.device)
            noise, share = torch.randn_like(pictures), kept[level][:, None]
            noisy = share.sqrt() * pictures + (1 - share).sqrt() * noise
            loss = nn.functional.mse_loss(model(noisy, level), noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(accelerator.unwrap_model(model))
            errors.append(loss.detach())
        error = accelerator.reduce(torch.stack(errors).mean(), "mean").item()
        if epoch % 10 == 9:
            accelerator.print(f"epoch {epoch:2d}  error {error:.3f} (without a prediction: 1)")

    start = torch.randn(DRAWN // accelerator.num_processes, 64, device=accelerator.device)
    drawn = accelerator.gather(draw(average.eval(), start)).cpu()
    from_digits, of_noise = distance(drawn, digits), distance(torch.randn(DRAWN, 64).clamp(-1, 1), digits)
    accelerator.print(f"distance from the nearest digit: {from_digits:.2f}; of noise: {of_noise:.2f}")
    sums = accelerator.gather(torch.stack([each.double().sum() for each in average.module.parameters()])[None])
    shown = error < 0.5 and from_digits < 0.7 * of_noise and torch.equal(sums, sums[:1].expand_as(sums))
    accelerator.print(
        f"error below half of that of no prediction, {len(drawn)} drawn pictures are nearer to digits than noise, averages "
        f"equal on {accelerator.num_processes} ranks: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
