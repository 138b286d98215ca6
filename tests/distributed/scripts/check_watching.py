"""What a run says of itself while it trains: throughput and the slow rank, replicas that part, losses that are no numbers."""

import os
import threading
import time
from unittest import mock

import torch
from harness import everywhere, fresh_accelerator, learn, rank, world
from torch import nn

from accelerate import FullyShardedDataParallelPlugin
from accelerate.extensions.checks.replicas import ReplicasDiffer
from accelerate.extensions.reports.throughput import PARTS

STEPS = 20


class Working(nn.Module):
    """A layer whose forward takes a separate time, however busy the machine is."""

    def __init__(self, seconds):
        super().__init__()
        self.layer, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x):
        threading.Event().wait(self.seconds)
        return self.layer(x)


def measured(rows=4, **options):
    """Train with a rank that is 30 % slower, the last; return the report and this rank's wall time per step."""
    accelerator = fresh_accelerator(**options)
    model = Working(0.08 * (1.3 if rank() == world() - 1 else 1.0))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(rows, 8, device=accelerator.device)
    accelerator.throughput()
    learn(accelerator, model(x).sum(), optimizer)
    accelerator.throughput(tokens=8 * rows, samples=rows)  # its FLOPs are counted, and its time is not
    start = time.perf_counter()
    for _ in range(STEPS):
        learn(accelerator, model(x).sum(), optimizer)
        accelerator.throughput(tokens=8 * rows, samples=rows)
    wall = time.perf_counter() - start
    report = accelerator.throughput_report(peak_flops=1e9)
    assert len({str(text) for text in everywhere(str(report))}) == 1
    accelerator.free_memory()
    return report, wall / STEPS


def check_a_slow_rank_is_named():
    report, wall = measured()
    assert report.slowest == (world() - 1 if world() > 1 else None), str(report)
    own = report.rows[rank()]
    assert abs(sum(own.shares) - 1) < 1e-9 and abs(own.step / wall - 1) < 0.05, (own, wall)
    assert abs(own.tokens * own.step / 32 - 1) < 1e-9
    # Through 8 x 8 weights: forward, and the gradients of the weights; those of the inputs are not needed.
    assert round(own.flops * own.step) == 2 * 2 * 4 * 8 * 8
    if rank() < world() - 1:
        assert own.shares[PARTS.index("communication")] > 0.1, str(report)


def check_a_slow_rank_is_named_where_parameters_are_gathered():
    if world() > 1:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        report, _ = measured(fsdp_plugin=plugin)
        assert report.slowest == world() - 1, str(report)


def parted(change, step=3, steps=4, every="2", modules=""):
    """Train with a change on the last rank before a step, and return the error of each rank."""
    told = None
    with mock.patch.dict(os.environ, ACCELERATE_CHECK_EVERY=every, ACCELERATE_CHECK_MODULES=modules):
        accelerator = fresh_accelerator()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    try:
        for number in range(1, steps + 1):
            x = torch.ones(2, 4, device=accelerator.device)
            if number == step and rank() == world() - 1:
                x = change(accelerator.unwrap_model(model), optimizer, x)
            learn(accelerator, model(x).sum(), optimizer)
    except (ReplicasDiffer, FloatingPointError) as error:
        told = f"step {number}: {type(error).__name__}: {error}"
    found = everywhere(told)
    assert len(set(found)) == 1, found
    return told


def flip_a_bit(model, optimizer, x):
    with torch.no_grad():
        model[1].weight.view(torch.int32)[0, 2] ^= 1
    return x


def raise_the_rate(model, optimizer, x):
    optimizer.param_groups[0]["lr"] = 0.2
    return x


def nothing(model, optimizer, x):
    return x


def infinite_input(model, optimizer, x):
    return x / 0


def infinite_inside(model, optimizer, x):
    with torch.no_grad():
        model[1].bias.fill_(float("inf"))
    return x


def check_replicas_that_part_are_named():
    assert parted(nothing) is None
    several, last = world() > 1, world() - 1
    told = parted(flip_a_bit, step=4)  # an update can round it away
    assert (told is not None) is several
    if several:
        assert told.startswith("step 4: ReplicasDiffer") and "- parameter '1.weight': " in told, told
        assert f" on rank {last}" in told and "'0.weight'" not in told, told
        told = parted(raise_the_rate)
        assert f"- learning rate of group 0: 0.1 on rank 0; 0.2 on rank {last}\n" in told or last > 1, told
        assert last < 2 or f"- learning rate of group 0: 0.2 on rank {last}; 0.1 on rank 0, 1" in told, told


def check_a_loss_that_is_no_number_is_named():
    told = parted(infinite_input)
    assert (
        f"step 4: FloatingPointError: A loss is NaN or infinite: first on rank {world() - 1}, in its backward pass 2."
        in told
    ), told
    told = parted(infinite_inside, modules="true")
    assert "backward pass 2; the first module with such an output: '1' (Linear)" in told, told
