"""A diffusers training loop: UNet, noise scheduler, EMA, checkpoint hooks as its scripts use them."""

import sys

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from tiny import report

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

folder = sys.argv[1]
project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=False)
accelerator = Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=1)
set_seed(0)
model = UNet2DModel(
    sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
    down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
)  # fmt: skip
average = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)
noise_schedule = DDPMScheduler(num_train_timesteps=20)


def save_hook(models, weights, output_dir):
    if accelerator.is_main_process:
        for item in models:
            accelerator.unwrap_model(item).save_pretrained(f"{output_dir}/unet")
    weights.clear()


def load_hook(models, input_dir):
    while models:
        item = models.pop()
        loaded = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
        accelerator.unwrap_model(item).load_state_dict(loaded.state_dict())


accelerator.register_save_state_pre_hook(save_hook)
accelerator.register_load_state_pre_hook(load_hook)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_cosine_schedule_with_warmup(optimizer, 2, 32)
images = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(2))
loader = torch.utils.data.DataLoader(images, batch_size=4)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses = []
generator = torch.Generator().manual_seed(5 + accelerator.process_index)
for number, clean in enumerate(loader):
    noise = torch.randn(clean.shape, generator=generator)
    steps = torch.randint(0, 20, (len(clean),), generator=generator)
    with accelerator.accumulate(model):
        predicted = model(noise_schedule.add_noise(clean, noise, steps), steps, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(predicted, noise)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        average.step(model.parameters())
    losses.append(accelerator.gather(loss.detach()).mean().item())
    if number == 1:
        accelerator.save_state(f"{folder}/checkpoint")
accelerator.load_state(f"{folder}/checkpoint")
accelerator.wait_for_everyone()
pipeline = DDPMPipeline(unet=accelerator.unwrap_model(model), scheduler=noise_schedule)
pipeline.set_progress_bar_config(disable=True)
image = pipeline(batch_size=1, num_inference_steps=2, output_type="np").images
assert image.shape == (1, 8, 8, 1) or image.shape == (1, 8, 8), image.shape
report(diffusion=losses, learning_rate=schedule.get_last_lr())
accelerator.end_training()
