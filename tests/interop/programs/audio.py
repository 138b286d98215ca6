"""A tagger with OneCycleLR and clipped gradients that saves every few steps and resumes in the middle of an epoch."""

import argparse
import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

SAMPLES, CLASSES, EPOCHS, SAVE_STEPS = 38, 5, 2, 3


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(1, 6, 5, stride=2), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 8, 3), nn.AdaptiveMaxPool1d(1)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, waves):
        return self.head(self.convolutions(waves).squeeze(-1))


def waves(count, seed):
    generator = torch.Generator().manual_seed(seed)
    times = torch.arange(32) / 32
    tags = (torch.rand(count, CLASSES, generator=generator) > 0.6).float()
    tones = torch.sin(times * (torch.arange(CLASSES)[:, None] + 1) * 6.283)
    return (tags @ tones)[:, None] + 0.1 * torch.randn(count, 1, 32, generator=generator), tags


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
parser.add_argument("--resume_from_checkpoint")
args = parser.parse_args()
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(12)
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train = DataLoader(TensorDataset(*waves(SAMPLES, 0)), batch_size=4, shuffle=True)
test = DataLoader(TensorDataset(*waves(13, 1)), batch_size=4)
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=2e-2, epochs=EPOCHS, steps_per_epoch=len(train), pct_start=0.3
)
model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)
first_epoch = resume_step = 0
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    overall_step = int(os.path.basename(args.resume_from_checkpoint).replace("step_", ""))
    first_epoch, resume_step = overall_step // len(train), overall_step % len(train)
else:
    overall_step = 0
result = {"losses": [], "norms": [], "rates": [], "precision": []}
for epoch in range(first_epoch, EPOCHS):
    model.train()
    train.set_epoch(epoch)
    if args.resume_from_checkpoint and epoch == first_epoch and resume_step:
        active = accelerator.skip_first_batches(train, resume_step)
    else:
        active = train
    for batch, tags in active:
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), tags)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        overall_step += 1
        result["losses"].append(accelerator.gather(loss.detach()).mean().item())
        result["norms"].append(norm.item())
        result["rates"].append(schedule.get_last_lr()[0])
        if overall_step % SAVE_STEPS == 0:
            accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
    model.eval()
    correct = []
    for batch, tags in test:
        with torch.no_grad():
            found = (model(batch) > 0).float()
        found, tags = accelerator.gather_for_metrics((found, tags))
        correct += (found == tags).float().mean(1).tolist()
    result["precision"].append([len(correct), sum(correct)])
accelerator.print(json.dumps(result))
