"""Two models and two optimizers that take turns, each in its own `accumulate`; schedulers and a restart from a checkpoint."""

import argparse
import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DataLoaderConfiguration, set_seed

NOISE, STEPS_PER_SAVE, EPOCHS = 4, 5, 2

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
parser.add_argument("--resume_from_checkpoint")
args = parser.parse_args()
ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
seedable = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(
    dataloader_config=seedable, gradient_accumulation_steps=3, kwargs_handlers=[ddp], project_dir=args.output_dir
)
set_seed(6)
generator = nn.Sequential(nn.Linear(NOISE, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))
discriminator = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.99))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=5e-3, betas=(0.5, 0.99))
scheduler_g = torch.optim.lr_scheduler.ExponentialLR(optimizer_g, 0.9)
scheduler_d = torch.optim.lr_scheduler.ExponentialLR(optimizer_d, 0.95)
loader = DataLoader(TensorDataset(torch.randn(46, 6) + 2), batch_size=4, shuffle=True)
generator, discriminator, optimizer_g, optimizer_d, scheduler_g, scheduler_d, loader = accelerator.prepare(
    generator, discriminator, optimizer_g, optimizer_d, scheduler_g, scheduler_d, loader
)
set_seed(7, device_specific=True)
score = nn.functional.binary_cross_entropy_with_logits
first_epoch = 0
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    first_epoch = 1 + int(args.resume_from_checkpoint.rpartition("_")[2])
result = {"losses": [], "updates": [], "rates": []}
for epoch in range(first_epoch, EPOCHS):
    loader.set_epoch(epoch)
    for (real,) in loader:
        fake = generator(torch.randn(len(real), NOISE))
        with accelerator.accumulate(discriminator):
            verdicts = discriminator(torch.cat([real, fake.detach()]))
            targets = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            loss_d = score(verdicts, targets)
            accelerator.backward(loss_d)
            optimizer_d.step()
            scheduler_d.step()
            optimizer_d.zero_grad()
            updates = [accelerator.sync_gradients]
        with accelerator.accumulate(generator):
            discriminator.requires_grad_(False)
            verdicts = accelerator.unwrap_model(discriminator)(fake)
            loss_g = score(verdicts, torch.ones_like(verdicts))
            accelerator.backward(loss_g)
            optimizer_g.step()
            scheduler_g.step()
            optimizer_g.zero_grad()
            discriminator.requires_grad_(True)
            updates += [accelerator.sync_gradients]
        both = torch.stack([loss_d.detach(), loss_g.detach()])
        result["losses"].append(accelerator.gather(both[None]).mean(0).tolist())
        result["updates"].append(updates)
    result["rates"].append([scheduler_d.get_last_lr()[0], scheduler_g.get_last_lr()[0]])
    accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
weights = [parameter.detach().sum() for parameter in accelerator.unwrap_model(generator).parameters()]
result["weights"] = torch.stack(weights).tolist()
accelerator.print(json.dumps(result))
