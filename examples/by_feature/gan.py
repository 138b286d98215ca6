"""Two models and two optimizers in one loop: a small GAN on handwritten digits.

All four are prepared, in one call or several; `prepare` knows which optimizer belongs to which model. Each has its own backward
and step. The generator's loss runs through the discriminator, so the discriminator's parameters do not ask for gradients meanwhile:
DDP would exchange them. `save_state` saves both models and both optimizers.

    accelerate launch --cpu --num_processes 2 examples/by_feature/gan.py

Prints: generator and discriminator are equal on 2 ranks, and fakes are closer to digits than noise: True
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

NOISE = 16


def distance(pictures: torch.Tensor, digits: torch.Tensor) -> float:
    """Return how far pictures are from their nearest digit, on average."""
    return torch.cdist(pictures, digits).min(dim=1).values.mean().item()


def equal_on_all_ranks(accelerator: Accelerator, model: nn.Module) -> bool:
    """Compare a model's weights over the ranks. Collective: call on every rank."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    all_ranks = accelerator.gather(weights[None])
    return torch.equal(all_ranks, all_ranks[:1].expand_as(all_ranks))


def main() -> None:
    accelerator = Accelerator()
    set_seed(0, device_specific=True)  # each rank draws noise of its own
    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    loader = DataLoader(TensorDataset(digits), batch_size=64, shuffle=True, drop_last=True)
    generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    judge = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    makes = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    judges = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
    generator, judge, makes, judges, loader = accelerator.prepare(generator, judge, makes, judges, loader)
    score = nn.functional.binary_cross_entropy_with_logits

    for epoch in range(10):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), NOISE, device=accelerator.device))
            verdicts = judge(torch.cat([real, fake.detach()]))
            truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(accelerator.device)
            loss = score(verdicts, truth)
            accelerator.backward(loss)
            judges.step()
            judges.zero_grad()

            judge.requires_grad_(False)
            verdict = accelerator.unwrap_model(judge)(fake)  # the module inside: nothing to exchange
            accelerator.backward(score(verdict, torch.ones_like(verdict)))
            makes.step()
            makes.zero_grad()
            judge.requires_grad_(True)
        accelerator.print(f"epoch {epoch}  loss of the discriminator on rank 0: {loss.item():.3f}")

    with torch.no_grad():
        fakes = generator(torch.randn(200, NOISE, device=accelerator.device)).cpu()
    closer = distance(fakes, digits) < 0.8 * distance(torch.rand(200, 64), digits)
    shown = equal_on_all_ranks(accelerator, generator) and equal_on_all_ranks(accelerator, judge) and closer
    ranks = accelerator.num_processes
    accelerator.print(
        f"generator and discriminator are equal on {ranks} ranks, and fakes are closer to digits than noise: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
