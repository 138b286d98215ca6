"""Processes that multiprocessing has started end while a checkpoint is being written in the background."""

import os
import socket
import sys
import time

import torch
import torch.multiprocessing
from torch import nn

from accelerate import Accelerator
from accelerate.checkpoint import formats
from accelerate.checkpoint import ranks as checkpoint_ranks


def train(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    # Who waits looks soon whether the others are still there.
    checkpoint_ranks.ASK_WRITERS_AFTER_S = checkpoint_ranks.ASK_WRITERS_AGAIN_S = 0.5
    real = formats.write_torch

    def slow(path, obj, *arguments, **options):
        if path.endswith("optimizer.bin"):
            time.sleep(2)  # what is tested is that a save may outlast the function
        return real(path, obj, *arguments, **options)

    formats.write_torch = slow
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(folder, blocking=False)


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(train, (port, sys.argv[1]), nprocs=2)
    print("ok spawned")
