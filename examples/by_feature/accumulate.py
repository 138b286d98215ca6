"""Large batches in small memory: gradients accumulate over micro-batches, and ranks exchange them once per step.

Global batch = micro-batch x accumulation steps x ranks. Inside `accumulate(model)` the prepared optimizer steps, and gradients are
exchanged, only with the last micro-batch; `sync_gradients` says when that is, for clipping, logging and checkpoints. The program
compares the weights with those of a plain loop over whole batches. `GradientAccumulationPlugin(exact=True)` would weigh the last,
shorter accumulation step of an epoch by its real length; here the data divide.

    accelerate launch --cpu --num_processes 2 examples/by_feature/accumulate.py

Prints: 4 micro-batches of 8 on 2 ranks equal batches of 64: True
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

GLOBAL_BATCH, STEPS = 64, 4


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=STEPS)
    set_seed(0)
    micro_batch = GLOBAL_BATCH // STEPS // accelerator.num_processes
    digits = load_digits()
    kept = len(digits.target) // GLOBAL_BATCH * GLOBAL_BATCH
    pixels, labels = torch.tensor(digits.data[:kept], dtype=torch.float32) / 16, torch.tensor(digits.target[:kept])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2)
    for images, targets in zip(pixels.split(GLOBAL_BATCH), labels.split(GLOBAL_BATCH), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(images), targets).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader = DataLoader(TensorDataset(pixels, labels), batch_size=micro_batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = 0
    for images, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)  # divides by the accumulation steps
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                updates += 1
            optimizer.step()
            optimizer.zero_grad()

    accelerator.print(f"{len(loader)} micro-batches on each rank, {updates} updates")
    pairs = zip(accelerator.unwrap_model(model).cpu().parameters(), plain.parameters(), strict=True)
    same = all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in pairs)
    accelerator.print(
        f"{STEPS} micro-batches of {micro_batch} on {accelerator.num_processes} ranks equal batches of {GLOBAL_BATCH}: {same}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
