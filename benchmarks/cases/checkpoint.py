"""What saving and loading a run costs: seconds on the clock, bytes, and memory at its peak. One process, or under torchrun.

The state is a model in float32 and AdamW's two moments of it, in 48 tensors each.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from accelerate import Accelerator

warnings.simplefilter("ignore")
torch.set_num_threads(1)
LAYERS = 48


def blocks(megabytes, value):
    """Return a model of a third of so many bytes."""
    width = int((megabytes * 2**20 / 4 / 3 / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def adamw(model, value=None):
    """Return an AdamW; with a value it has been stepped."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters() if value is not None else ():
        moments = {name: torch.full_like(parameter, value) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return optimizer


def clock(task):
    """Return the seconds of a task in which all ranks take part."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    task()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - start


def sync(folder):
    """See to it that the disk has every file of a folder."""
    for path in [*(file for file in folder.rglob("*") if file.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def settled(accelerator, folder):
    """Remove a checkpoint, and let the disk come to rest."""
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    accelerator.wait_for_everyone()


def save_times(accelerator, folder, repeats):
    """Return medians: saving as it is, saving until the disk has it, saving while nothing waits for the disk."""
    series = {}
    for _ in range(repeats):
        settled(accelerator, folder)
        saved = clock(lambda: accelerator.save_state(str(folder)))
        series.setdefault("save_state (s)", []).append(saved)
        durable = clock(lambda: accelerator.is_main_process and sync(folder))
        series.setdefault("save_state, and on the disk (s)", []).append(saved + durable)
        settled(accelerator, folder)
        waits, os.fsync = os.fsync, lambda descriptor: None
        series.setdefault("save_state, fsync left out (s)", []).append(
            clock(lambda: accelerator.save_state(str(folder)))
        )
        os.fsync = waits
    return {name: statistics.median(values) for name, values in series.items()}


def times(accelerator, megabytes, folder, repeats):
    """Save, load into what is there, and load into what was just made, as a run does that goes on."""
    model = blocks(megabytes, 1.0)
    model, optimizer = accelerator.prepare(model, adamw(model, 1.0))
    figures = save_times(accelerator, folder, repeats)
    if accelerator.is_main_process:
        figures["written (MB)"] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    sync(folder)
    figures["load_state, over a state (s)"] = statistics.median(
        clock(lambda: accelerator.load_state(str(folder))) for _ in range(repeats)
    )
    resumed = []
    for _ in range(repeats):
        del model, optimizer
        accelerator.free_memory()
        model = blocks(megabytes, 2.0)
        model, optimizer = accelerator.prepare(model, adamw(model))
        resumed.append(clock(lambda: accelerator.load_state(str(folder))))
        assert all(bool((parameter == 1).all()) for parameter in model.parameters())
        assert len(optimizer.state_dict()["state"]) == LAYERS
    figures["load_state, new run (s)"] = statistics.median(resumed)
    return figures


def peak(megabytes, folder, repeats, accelerator):
    """Save and load over the state, and return what the process took at most, and beyond its libraries and the state."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = blocks(megabytes, 1.0)
    model, optimizer = accelerator.prepare(model, adamw(model, 1.0))
    for _ in range(repeats):
        accelerator.save_state(str(folder))
        accelerator.load_state(str(folder))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak memory (MB)": most / 2**10, "beyond the state (MB)": (most - before) / 2**10 - megabytes}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    folder = Path(arguments.folder)
    if arguments.memory:
        figures = peak(arguments.megabytes, folder, 1, accelerator)
    else:
        figures = times(accelerator, arguments.megabytes, folder, arguments.repeats)
    if accelerator.is_main_process:
        print(json.dumps(figures), flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
