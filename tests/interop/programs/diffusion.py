"""A denoiser with a moving average of its weights, gradient accumulation, a tracker and a rotation of checkpoints."""

import argparse
import json
import os
import shutil

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

NOISE_STEPS, MAX_STEPS, SAVE_STEPS, TOTAL_LIMIT = 10, 12, 4, 2


class ListTracker(GeneralTracker):
    name, requires_logging_directory = "list", False

    def __init__(self):
        super().__init__()
        self.lines, self.config = [], {}

    tracker = property(lambda self: self.lines)

    @on_main_process
    def store_init_configuration(self, values):
        self.config = values

    @on_main_process
    def log(self, values, step, **kwargs):
        self.lines.append([step, values["loss"], values["lr"]])


class MovingAverage:
    def __init__(self, model, decay=0.9):
        self.decay, self.weights = decay, [p.detach().clone() for p in model.parameters()]

    def step(self, model):
        for average, weight in zip(self.weights, model.parameters(), strict=True):
            average.lerp_(weight.detach(), 1 - self.decay)

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = state["weights"]


def saved_checkpoints():
    names = [name for name in os.listdir(args.output_dir) if name.startswith("checkpoint")]
    return sorted(names, key=lambda name: int(name.split("-")[1]))


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
parser.add_argument("--resume_from_checkpoint")
args = parser.parse_args()
project = ProjectConfiguration(project_dir=args.output_dir, logging_dir=os.path.join(args.output_dir, "logs"))
seedable = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(
    dataloader_config=seedable, gradient_accumulation_steps=2, log_with=ListTracker(), project_config=project
)
set_seed(1)
unet = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 8))
average = MovingAverage(unet)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-2)
lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
loader = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4, shuffle=True)
unet, optimizer, loader, lr_scheduler = accelerator.prepare(unet, optimizer, loader, lr_scheduler)
accelerator.register_for_checkpointing(average)
accelerator.init_trackers("denoise", config={"decay": 0.9})
kept = torch.cumprod(1 - torch.linspace(0.01, 0.3, NOISE_STEPS), dim=0)
set_seed(2, device_specific=True)
global_step, losses = 0, []
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    global_step = int(args.resume_from_checkpoint.rpartition("-")[2])
while global_step < MAX_STEPS:
    train_loss = 0.0
    loader.set_epoch(2 * global_step // len(loader))
    for (clean,) in loader:
        with accelerator.accumulate(unet):
            noise, steps = torch.randn_like(clean), torch.randint(0, NOISE_STEPS, (len(clean), 1))
            noisy = kept[steps].sqrt() * clean + (1 - kept[steps]).sqrt() * noise
            loss = nn.functional.mse_loss(unet(torch.cat([noisy, steps / NOISE_STEPS], dim=1)), noise)
            train_loss += accelerator.gather(loss.detach().repeat(len(clean))).mean().item() / 2
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.step(unet)
            global_step += 1
            accelerator.log({"loss": train_loss, "lr": lr_scheduler.get_last_lr()[0]}, step=global_step)
            losses.append(train_loss)
            train_loss = 0.0
            if global_step % SAVE_STEPS == 0:
                if accelerator.is_main_process:
                    saved = saved_checkpoints()
                    for name in saved[: max(0, len(saved) - TOTAL_LIMIT + 1)]:
                        shutil.rmtree(os.path.join(args.output_dir, name))
                accelerator.wait_for_everyone()
                accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{global_step}"))
accelerator.wait_for_everyone()
result = {"losses": losses, "checkpoints": saved_checkpoints()}
result["average"] = [weight.sum().item() for weight in average.weights]
for tracker in accelerator.trackers:
    if tracker.name == "list":
        result["tracked"] = tracker.tracker
accelerator.end_training()
accelerator.print(json.dumps(result))
