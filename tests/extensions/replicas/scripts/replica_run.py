"""One replica group: trains, and writes a line for each committed step, with the samples that each micro-batch used.

Option `kills` says where it kills itself: {"<start>": ["<phase>", steps]}, at that phase, so many steps after it has joined; a start
counts how often the group was started. With the option `peer`, it takes `solo` steps without the peer, and then waits for its next start.
"""

import hashlib
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from accelerate import Accelerator
from accelerate.extensions.replicas.settings import FaultToleranceKwargs
from accelerate.utils import FullyShardedDataParallelPlugin


def options(given=None):
    return {
        "samples": 40,
        "batch": 4,
        "epochs": 2,
        "accumulation": 1,
        "clip": 0.5,
        **(json.loads(os.environ["OPTIONS"]) if given is None else given),
    }


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(count, 2, generator=generator, dtype=torch.float64)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return index, self.inputs[index], self.targets[index]


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def digest(parameters):
    wholes = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return hashlib.sha256(b"".join(whole.detach().numpy().tobytes() for whole in wholes)).hexdigest()


class Schedule:
    """When this group kills itself, and when it waits for its peer to start again."""

    def __init__(self, settings, name, start, rank):
        self.settings, self.name, self.start, self.rank = settings, name, start, rank
        self.phase, self.steps = settings.get("kills", {}).get(name, {}).get(str(start), (None, 0))
        self.joined_at, self.solo, self.peer_starts, self.is_together = None, 0, 0, False
        port = os.environ.get("SCHEDULE_PORT")
        self.store = dist.TCPStore("localhost", int(port), is_master=False) if port else None

    def joins(self, groups):
        if self.store is not None and self.rank == 0:
            groups._connect()  # so that the lighthouse knows of it before the peer does
            self.store.set(f"{self.name}{self.start}", "")
            for survivor in self.settings.get("peer", {}).keys() - {self.name}:
                self.store.wait([f"{survivor}0"], timedelta(seconds=240))

    def point(self, phase, step):
        self.joined_at = step if self.joined_at is None else self.joined_at
        if phase == self.phase and step >= self.joined_at + self.steps and self.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def committed(self, count):
        peer = self.settings.get("peer", {}).get(self.name)
        if peer is None or self.rank:
            return
        if count > 1:
            self.is_together, self.solo = True, 0
            return
        self.peer_starts += self.is_together  # it has died, and starts once more
        self.is_together, self.solo = False, self.solo + 1
        if self.solo == self.settings["solo"] and self.peer_starts <= len(self.settings["kills"][peer]):
            self.store.wait([f"{peer}{self.peer_starts}"], timedelta(seconds=240))


def main(folder, name):
    settings = options()
    rank = int(os.environ.get("RANK", 0))
    starts = folder / f"{name}-{rank}.starts"
    start = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("x" * (start + 1))
    schedule = Schedule(settings, name, start, rank)
    handler = FaultToleranceKwargs(
        lighthouse=settings["lighthouse"],
        min_replicas=settings.get("min", 1),
        timeout_s=20,
        quorum_timeout_s=100,
        replica_id=name,
    )
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if settings.get("fsdp") else None
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=settings["accumulation"], kwargs_handlers=[handler], fsdp_plugin=plugin
    )
    # Each group starts from other weights: those of one of them count.
    model, optimizer, scheduler = build(seed=ord(name[0]) + start)
    loader = torch.utils.data.DataLoader(Numbers(settings["samples"]), batch_size=settings["batch"], shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    groups = accelerator.replicas
    schedule.joins(groups)
    with open(folder / f"{name}-{rank}.jsonl", "a", buffering=1) as log:
        batches = []
        for epoch in range(settings["epochs"]):
            for ids, inputs, targets in accelerator.replica_batches(loader, epoch):
                step = groups.step
                if not batches:
                    first = digest(model.parameters())
                batches.append([accelerator.gather(ids).tolist(), groups.weight])
                schedule.point("read", step)
                with accelerator.accumulate(model):
                    loss = (model(inputs) - targets).square().mean()
                    schedule.point("forward", step)
                    line = {
                        "epoch": epoch,
                        "step": step,
                        "rank": groups.rank,
                        "count": groups.count,
                        "batches": batches,
                    }
                    log.write(json.dumps({"kind": "begun", "start": start, **line}) + "\n")
                    accelerator.backward(loss)
                    schedule.point("backward", step)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), settings["clip"])
                    optimizer.step()
                    schedule.point("step", step)
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    if groups.step > step:
                        line |= {
                            "first": first,
                            "last": digest(model.parameters()),
                            "rate": scheduler.get_last_lr()[0],
                        }
                        log.write(json.dumps({"kind": "committed", "start": start, **line}) + "\n")
                        schedule.committed(groups.count)
                    batches = []
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save({"weights": weights, "failures": groups.failures, "step": groups.step}, folder / f"{name}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
