"""Sixteen programs that hang, by name. A line that ends with `# rank N` is where that rank stands then."""

import os
import signal
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.tracking import GeneralTracker

FOREVER_S = 600


class TwoHeads(nn.Module):
    """A model with a layer that a rank may omit."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, inputs, both=True):
        hidden = self.one(inputs)
        return self.other(hidden) if both else hidden


class Stalling(Dataset):
    """Data of which one rank's worker process stands still at an item."""

    def __init__(self, stalls):
        self.stalls = stalls

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.stalls and index == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.ones(4)


def skipped_gather(accelerator, rank):
    if rank == 0:
        accelerator.gather(torch.ones(3))  # rank 0
    accelerator.wait_for_everyone()  # rank 1


def early_break(accelerator, rank):
    model = accelerator.prepare(nn.Linear(4, 1))
    for step in range(4):
        if rank == 1 and step == 2:
            break
        accelerator.backward(model(torch.ones(2, 4)).sum())  # rank 0
    accelerator.wait_for_everyone()  # rank 1


def uneven_loader(accelerator, rank):
    """Train on loaders of different lengths, without a join."""
    model = accelerator.prepare(nn.Linear(4, 1))
    for batch in DataLoader(torch.ones(8 - 4 * (rank == 1), 4), batch_size=2):
        accelerator.backward(model(batch).sum())  # rank 0
    accelerator.wait_for_everyone()  # rank 1


def other_order(accelerator, rank):
    """Call the same two collectives in another order."""
    if rank == 0:
        dist.all_reduce(torch.ones(2))  # rank 0
        dist.barrier()
    else:
        dist.barrier()  # rank 1
        dist.all_reduce(torch.ones(2))


def other_shapes(accelerator, rank):
    """Reduce tensors of other shapes; torch does not compare them."""
    dist.all_reduce(torch.ones(2 - (rank == 1)))  # rank 0 # rank 1


def caught_exception(accelerator, rank):
    """Catch an exception on rank 1, and wait in its handler."""
    try:
        if rank == 1:
            raise ValueError("bad batch")
        accelerator.gather(torch.ones(3))  # rank 0
    except ValueError:
        accelerator.wait_for_everyone()  # rank 1


def dead_worker(accelerator, rank):
    """Read with a worker process without progress on rank 1."""
    for _ in DataLoader(Stalling(rank == 1), num_workers=1):  # rank 1
        accelerator.reduce(torch.ones(1))  # rank 0


def dead_rank(accelerator, rank):
    accelerator.wait_for_everyone()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    accelerator.wait_for_everyone()  # rank 0


def sleeping_rank(accelerator, rank):
    if rank == 1:
        time.sleep(FOREVER_S)  # rank 1
    accelerator.wait_for_everyone()  # rank 0


class LockedTracker(GeneralTracker):
    """A tracker whose lock is never released."""

    name, requires_logging_directory, main_process_only = "locked", False, True

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.lock.acquire()

    @property
    def tracker(self):
        """Nothing."""

    def log(self, values, step=None, **kwargs):
        with self.lock:  # rank 0
            pass

    def store_init_configuration(self, values):
        """Store nothing."""


def locked_tracker(accelerator, rank):
    accelerator.trackers = [LockedTracker()]
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.wait_for_everyone()  # rank 1


def collective_in_main_process_first(accelerator, rank):
    with accelerator.main_process_first():  # rank 1
        accelerator.gather(torch.ones(3))  # rank 0


def save_on_main_alone(accelerator, rank):
    accelerator.prepare(nn.Linear(4, 1))
    if accelerator.is_main_process:
        accelerator.save_state(tempfile.mkdtemp())  # rank 0
    accelerator.wait_for_everyone()  # rank 1


def unused_parameter(accelerator, rank):
    model = accelerator.prepare(TwoHeads())
    accelerator.backward(model(torch.ones(2, 4), both=rank == 0).sum())  # rank 0
    accelerator.wait_for_everyone()  # rank 1


def sharded_forward(accelerator, rank):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    model = Accelerator(cpu=True, fsdp_plugin=plugin).prepare(nn.Linear(4, 4))
    if rank == 0:
        model(torch.ones(2, 4))  # rank 0
    dist.barrier()  # rank 1


def skipped_module(accelerator, rank):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1)
    model = Accelerator(cpu=True, fsdp_plugin=plugin).prepare(TwoHeads())
    model(torch.ones(2, 4), both=rank == 0)
    dist.barrier()  # rank 1


def barrier_in_thread(accelerator, rank):
    if rank == 0:
        thread = threading.Thread(target=dist.barrier)
        thread.start()
        thread.join()  # rank 0
    dist.all_reduce(torch.ones(3))  # rank 1


SEEDS = [
    *(skipped_gather, early_break, uneven_loader, other_order, other_shapes, caught_exception, dead_worker, dead_rank),
    *(sleeping_rank, locked_tracker, collective_in_main_process_first, save_on_main_alone, unused_parameter),
    *(sharded_forward, skipped_module, barrier_in_thread),
]


def main(name):
    function = next(seed for seed in SEEDS if seed.__name__ == name)
    if function in (sharded_forward, skipped_module):
        return function(None, int(os.environ["RANK"]))
    accelerator = Accelerator(cpu=True)
    function(accelerator, accelerator.process_index)


if __name__ == "__main__":
    main(sys.argv[1])
