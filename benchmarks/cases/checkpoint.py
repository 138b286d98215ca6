"""What saving and loading a run costs: seconds on the clock, bytes, and memory at its peak. One process, or under torchrun.

The state is a model in float32 and AdamW's two moments of it, in 48 tensors each.
"""

import argparse
import json
import os
import shutil
import statistics
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from device import CPU, DEVICE, finish
from torch import nn

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin

warnings.simplefilter("ignore")
torch.set_num_threads(1)
LAYERS = 48


def blocks(megabytes, value):
    """Return a model of a third of so many bytes."""
    width = int((megabytes * 2**20 / 4 / 3 / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model.to(DEVICE)


def adamw(model, value=None):
    """Return an AdamW; with a value it has been stepped."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters() if value is not None else ():
        moments = {name: torch.full_like(parameter, value) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return optimizer


def stepped(megabytes):
    """Return a model and an optimizer that has been stepped."""
    model = blocks(megabytes, 1.0)
    return model, adamw(model, 1.0)


def clock(task):
    """Return the seconds of a task in which all ranks take part."""
    if dist.is_initialized():
        dist.barrier()
    finish()
    start = time.perf_counter()
    task()
    finish()
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
        series.setdefault("save_state without fsync (s)", []).append(
            clock(lambda: accelerator.save_state(str(folder)))
        )
        os.fsync = waits
    return {name: statistics.median(values) for name, values in series.items()}


def save(accelerator, megabytes, folder, repeats):
    """Save, and load over the state that is there. The checkpoint is left behind."""
    accelerator.prepare(*stepped(megabytes))
    figures = save_times(accelerator, folder, repeats)
    figures["written (MB)"] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    over = [clock(lambda: accelerator.load_state(str(folder))) for _ in range(repeats)]
    return {**figures, "load_state, over a state (s)": statistics.median(over)}


def load(accelerator, megabytes, folder, repeats):
    """Load once into what was just made, as a run does that continues."""
    model = blocks(megabytes, 2.0)
    model, optimizer = accelerator.prepare(model, adamw(model))
    loaded = clock(lambda: accelerator.load_state(str(folder)))
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())
    assert len(optimizer.state_dict()["state"]) == LAYERS
    return {"load_state, new run (s)": loaded}


def memory(accelerator, megabytes, folder, repeats):
    """Save and load over the state, and return what the process took at most, and beyond its libraries and the state.

    Pages of files that are mapped count in the resident memory, though the system takes them back whenever it needs them; so the
    anonymous memory is told apart.
    """
    stop, most = threading.Event(), {"RssAnon": 0, "VmRSS": 0}

    def now():
        lines = Path("/proc/self/status").read_text().splitlines()
        return {name: int(line.split()[1]) / 2**10 for line in lines for name in most if line.startswith(f"{name}:")}

    def watch():
        while not stop.wait(0.002):
            for name, value in now().items():
                most[name] = max(most[name], value)

    before = now()
    accelerator.prepare(*stepped(megabytes))
    watching = threading.Thread(target=watch)
    watching.start()
    accelerator.save_state(str(folder))
    accelerator.load_state(str(folder))
    stop.set()
    watching.join()
    return {
        "anonymous memory beyond libraries and state (MB)": most["RssAnon"] - before["RssAnon"] - megabytes,
        "beyond libraries and state, with pages of files (MB)": most["VmRSS"] - before["VmRSS"] - megabytes,
    }


def background(accelerator, megabytes, folder, repeats):
    """Save while the training continues: how long that stops, and how long its steps take meanwhile. Ours alone."""
    model, optimizer = accelerator.prepare(*stepped(megabytes))
    state = [*model.parameters(), *(value for kept in optimizer.state.values() for value in kept.values())]
    copies = [tensor.detach().cpu().clone() for tensor in state]
    width = model[0].in_features if isinstance(model, nn.Sequential) else model.module[0].in_features
    rows = torch.ones(64, width, device=DEVICE)

    def step():
        start = time.perf_counter()
        optimizer.zero_grad()
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        finish()
        return time.perf_counter() - start

    blocked, copied, alone, meanwhile = [], [], [], []
    for number in range(repeats + 1):
        settled(accelerator, folder)
        for copy, tensor in zip(copies, state, strict=True):
            copy.copy_(tensor.detach())  # as memory that a copy has used before
        finish()
        start = time.perf_counter()
        for copy, tensor in zip(copies, state, strict=True):
            copy.copy_(tensor.detach())
        finish()
        copied.append(time.perf_counter() - start)
        alone += [step() for _ in range(10)]
        stopped = clock(lambda: accelerator.save_state(str(folder), blocking=False))
        while not folder.exists():
            meanwhile.append(step())
        accelerator.wait_for_checkpoint()
        alone += [step() for _ in range(10)]
        if number:  # the first one has to get the memory
            blocked.append(stopped)
    return {
        "one copy of the state (s)": statistics.median(copied),
        "save_state(blocking=False) (s)": statistics.median(blocked),
        "a step (s)": statistics.median(alone),
        "a step while a save is written (s)": statistics.median(meanwhile),
    }


def shards(accelerator, megabytes, folder, repeats):
    """Save and load shards next to plain torch.distributed.checkpoint and one fsync. Under torchrun, ours alone."""
    model = blocks(megabytes, 1.0)
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.backward(model(torch.ones(1, model[0].in_features, device=DEVICE)).square().mean())
    optimizer.step()  # makes the moments of the shards
    state = {"model": model.state_dict(), "optimizer": {str(k): v for k, v in optimizer.state_dict()["state"].items()}}
    local = [value.to_local() for value in [*model.parameters(), *_moments(optimizer)]]
    copies = [tensor.detach().clone() for tensor in local]
    series = {}

    def note(name, task):
        settled(accelerator, folder)
        series.setdefault(name, []).append(clock(task))

    def plain():
        dcp.save(state, checkpoint_id=str(folder / "plain"))
        if accelerator.is_main_process:
            sync(folder)

    def copy():
        for made, tensor in zip(copies, local, strict=True):
            made.copy_(tensor.detach())

    for number in range(repeats + 1):
        if number == 1:
            series.clear()  # the first one has to get the memory
        note("plain save, and on the disk (s)", plain)
        series.setdefault("plain load (s)", []).append(
            clock(lambda: dcp.load(state, checkpoint_id=str(folder / "plain")))
        )
        note("save_state (s)", lambda: accelerator.save_state(str(folder)))
        series.setdefault("load_state (s)", []).append(clock(lambda: accelerator.load_state(str(folder))))
        note("one copy of the local shards (s)", copy)
        note("save_state(blocking=False) (s)", lambda: accelerator.save_state(str(folder), blocking=False))
        accelerator.wait_for_checkpoint()
    return {name: statistics.median(values) for name, values in series.items()}


def _moments(optimizer):
    for kept in optimizer.state.values():
        yield from (value for value in kept.values() if value.dim())


def main():
    phases = {task.__name__: task for task in (save, load, memory, background, shards)}
    parser = argparse.ArgumentParser()
    parser.add_argument("phase", choices=phases)
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if arguments.phase == "shards" else None
    accelerator = Accelerator(cpu=CPU, fsdp_plugin=plugin)
    figures = phases[arguments.phase](accelerator, arguments.megabytes, Path(arguments.folder), arguments.repeats)
    if accelerator.is_main_process:
        print(json.dumps(figures), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
