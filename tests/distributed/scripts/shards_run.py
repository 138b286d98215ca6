"""A run that saves its shards in the background without end: `test_crash` kills it. What it loads must be of one step, on all ranks."""

import sys

import torch
from harness import Kept
from torch import nn

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration

LEAST = int(sys.argv[2])  # the step that was in its place when the former run was killed
accelerator = Accelerator(
    cpu=True,
    fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    project_config=ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True, total_limit=2),
)
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(1, 512)).sum())
optimizer.step()
optimizer.zero_grad()
counter = Kept(step=0)
accelerator.register_for_checkpointing(counter)


def values():
    moments = [value for kept in optimizer.state.values() for name, value in kept.items() if name != "step"]
    return [tensor.detach().to_local() for tensor in (*model.parameters(), *moments)]


if accelerator.load_state(missing_ok=True) is not None:
    assert all(bool((value == counter.state["step"]).all()) for value in values()), counter.state["step"]
assert counter.state["step"] >= LEAST, (counter.state["step"], LEAST)
accelerator.wait_for_everyone()
accelerator.print(f"loaded {counter.state['step']}", flush=True)
while True:
    accelerator.wait_for_checkpoint()
    accelerator.wait_for_everyone()
    accelerator.print(f"saved {counter.state['step']}", flush=True)
    counter.state["step"] += 1
    for value in values():
        value.fill_(counter.state["step"])
    accelerator.save_state(blocking=False)
    for value in values():  # the training continues
        value.fill_(-1)
    accelerator.backward(model(torch.ones(1, 512)).sum())
    optimizer.zero_grad()
