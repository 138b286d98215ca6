"""Ten programs in which a rank is slow, and all come to their end."""

import os
import subprocess
import sys
import tempfile
import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator

SLOW_S = 4.0  # twice the limit that the test sets


def compute():
    """Keep the processor busy for a while."""
    deadline = time.monotonic() + SLOW_S
    while time.monotonic() < deadline:
        torch.ones(64, 64) @ torch.ones(64, 64)


class SlowBackward(torch.autograd.Function):
    """Computes for a while in its backward pass."""

    @staticmethod
    def forward(ctx, inputs, slow):
        ctx.slow = slow
        return inputs.clone()

    @staticmethod
    def backward(ctx, grads):
        if ctx.slow:
            compute()
        return grads, None


class SlowData(Dataset):
    """Data of which one item takes a while."""

    def __init__(self, slow):
        self.slow = slow

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if self.slow and index:
            time.sleep(SLOW_S)
        return torch.ones(4)


def step(accelerator, rank):
    if rank == 1:
        compute()


def sleep(accelerator, rank):
    if rank == 1:
        time.sleep(SLOW_S)


def backward(accelerator, rank):
    """Compute in the backward pass of rank 1, while rank 0 waits for its gradients."""
    model = accelerator.prepare(nn.Linear(4, 1))
    outputs = model(torch.ones(2, 4))
    accelerator.backward(SlowBackward.apply(outputs, rank == 1).sum())


def loader(accelerator, rank):
    for _ in DataLoader(SlowData(rank == 1), num_workers=1):
        accelerator.reduce(torch.ones(1))


def main_process_first(accelerator, rank):
    with accelerator.main_process_first():
        if rank == 0:
            compute()


def save(accelerator, rank):
    accelerator.prepare(nn.Linear(4, 1))
    folder = accelerator.gather_for_metrics([tempfile.mkdtemp()], use_gather_object=True)[0]
    hook = accelerator.register_save_state_pre_hook(lambda *_: compute() if rank == 0 else None)
    accelerator.save_state(folder)
    hook.remove()


def evaluation(accelerator, rank):
    if accelerator.is_main_process:
        deadline = time.monotonic() + SLOW_S
        while time.monotonic() < deadline:
            sorted(str(number) for number in range(10_000))


def child(accelerator, rank):
    if rank == 1:
        subprocess.run([sys.executable, "-c", f"import time; time.sleep({SLOW_S})"], check=True)


def thread(accelerator, rank):
    if rank == 1:
        works = threading.Thread(target=compute)
        works.start()
        works.join()


def retry(accelerator, rank):
    try:
        if rank == 1:
            raise OSError("not yet")
    except OSError:
        time.sleep(SLOW_S)


HEALTHY = [step, sleep, backward, loader, main_process_first, save, evaluation, child, thread, retry]


def main():
    """Run them one after another, on ranks of which one comes late."""
    if os.environ["RANK"] == "1":
        time.sleep(SLOW_S)
    accelerator = Accelerator(cpu=True)
    for function in HEALTHY:
        function(accelerator, accelerator.process_index)
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        accelerator.print(f"ok {function.__name__}", flush=True)


if __name__ == "__main__":
    main()
