"""Survive the failure of a rank, and lose few steps.

Rank 1 is killed. All ranks start again, forked from a process that has imported torch, and resume from copies in host memory: there is no
checkpoint on the disk. The final weights are compared with plain PyTorch on the same batches.

    accelerate launch --cpu --num_processes 2 --warm_start --max_restarts 1 examples/by_feature/survive.py

Prints: rank 1 was killed after step 7, the run resumed from memory, at most 3 steps were repeated, weights as without a failure: True
"""

import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.extensions.peer_memory.options import PeerMemoryKwargs
from accelerate.utils import set_seed

STEPS, FAILS = 12, 7


def objects(batch_size: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """Return a model, its optimizer and its data, the same on each rank and at each start."""
    set_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1), DataLoader(torch.randn(STEPS * 16, 4), batch_size)


def main() -> None:
    # A copy after every second step. The next one begins when it is complete on all ranks.
    accelerator = Accelerator(kwargs_handlers=[PeerMemoryKwargs(every=2)])
    model, optimizer, loader = accelerator.prepare(*objects(batch_size=8))
    resumed = accelerator.resume_from_memory()  # None at the first start
    for step, batch in enumerate(loader, 1 if resumed is None else resumed.steps + 1):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == FAILS and resumed is None:
            accelerator.wait_for_everyone()
            if accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    plain, optimizer, loader = objects(batch_size=16)  # a batch of both ranks
    for batch in loader:
        plain(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    few = resumed.source == "memory" and resumed.steps >= FAILS - 3
    same = torch.allclose(accelerator.unwrap_model(model).weight, plain.weight, atol=1e-6)
    accelerator.print(
        f"rank 1 was killed after step {FAILS}, the run resumed from {resumed.source}, at most 3 steps were repeated, "
        f"weights as without a failure: {few and same}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
