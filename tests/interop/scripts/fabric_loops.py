"""Loops of Lightning Fabric and of the Accelerator in one process: one after the other, and one inside the other.

`fabric_loops.py FOLDER CASE ...` runs each case in a fork of this process. A case is a sequence of loops (`fabric>accelerate`) or the name
of a mixture. It reports the losses, and the settings of the process that a loop has changed. Forks meet at a port that rank 0 chooses.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer imports it, which takes two seconds
import torch.distributed as dist
from lightning_fabric import Fabric
from run_programs import RANK, RANKS, choose_port
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

ROWS, GLOBAL_BATCH, EPOCHS, ACCUMULATION = 48, 4, 2, 2
# Fabric takes part in the processes of a launcher, and starts processes itself without one.
STRATEGY = {"accelerator": "cpu", "devices": RANKS, "strategy": "ddp" if RANKS > 1 else "auto"}


def parts(ranks=RANKS):
    """Return a model with dropout, its optimizer and a shuffled loader; equal on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    inputs = torch.randn(ROWS, 6)
    rows = TensorDataset(inputs, inputs[:, :3].argmax(-1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, DataLoader(rows, GLOBAL_BATCH // ranks, shuffle=True)


def cross_entropy(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs).float(), labels)


def train_with_fabric(precision="32-true"):
    fabric = Fabric(precision=precision, **STRATEGY)
    fabric.launch()
    model, optimizer, loader = parts()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    fabric.seed_everything(5, verbose=False)
    losses = []
    for epoch in range(EPOCHS):
        if RANKS > 1:
            loader.sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            accumulates = step % ACCUMULATION != ACCUMULATION - 1
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = cross_entropy(model, batch)
                fabric.backward(loss / ACCUMULATION)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach()).item())
    return losses


def train_with_accelerate(precision="no", ranks=RANKS):
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=ACCUMULATION)
    model, optimizer, loader = accelerator.prepare(*parts(ranks))
    set_seed(5)
    losses = []
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


LOOPS = {
    "fabric": train_with_fabric, "fabric-bf16": lambda: train_with_fabric("bf16-true"),
    "fabric-64": lambda: train_with_fabric("64-true"), "accelerate": train_with_accelerate,
    "accelerate-bf16": lambda: train_with_accelerate("bf16"),
}  # fmt: skip


def settings():
    """Return the global settings of the process."""
    watched = (DataLoader.__init__, DataLoader.__setattr__, BatchSampler.__init__)
    return {
        "default dtype": str(torch.get_default_dtype()), "default device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(), "process group": dist.is_initialized(), "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "gradients": torch.is_grad_enabled(),
        "matmul": torch.get_float32_matmul_precision(), "methods": [method.__module__ for method in watched], **os.environ,
    }  # fmt: skip


def train_in_turn(names):
    losses, changed = {}, {}
    for name in names:
        before = settings()
        losses[name] = LOOPS[name]()
        after = settings()
        changed[name] = {key: after.get(key) for key in before | after if before.get(key) != after.get(key)}
    return {"losses": losses, "changed": changed}


def launched():
    """Fabric launches a function, in which it replaces methods of loaders and samplers."""
    return {"losses": Fabric(**STRATEGY).launch(lambda fabric: train_with_accelerate())}


def started():
    """Fabric starts two processes, which have no RANK in their environment."""

    def train(fabric):
        losses = train_with_accelerate(ranks=2)
        accelerator = Accelerator(cpu=True)
        ranks = accelerator.gather(torch.tensor([fabric.global_rank, accelerator.process_index])).tolist()
        return losses, ranks

    losses, ranks = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork").launch(train)
    return {"losses": losses, "ranks": ranks}


def trained(accelerator, backward, model, optimizer, loader):
    set_seed(5)
    losses = []
    for batch in loader:
        loss = cross_entropy(model, batch)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses}


def prepared_loader():
    """Fabric trains with the Accelerator's loader."""
    accelerator, fabric = Accelerator(cpu=True), Fabric(**STRATEGY)
    fabric.launch()
    model, optimizer, loader = parts()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(accelerator.prepare(loader), use_distributed_sampler=False)
    return trained(accelerator, fabric.backward, model, optimizer, loader)


def prepared_model():
    """The Accelerator prepares a model, which a script of Fabric trains with Fabric's autocast."""
    fabric, accelerator = Fabric(**STRATEGY), Accelerator(cpu=True)
    fabric.launch()
    model, optimizer, loader = accelerator.prepare(*parts())
    with fabric.autocast():
        return trained(accelerator, accelerator.backward, model, optimizer, loader)


def set_up_model():
    """The Accelerator trains a model and an optimizer that Fabric has set up."""
    fabric = Fabric(**STRATEGY)
    fabric.launch()
    model, optimizer, loader = parts()
    model, optimizer = fabric.setup(model, optimizer)
    accelerator = Accelerator(cpu=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    return trained(accelerator, accelerator.backward, model, optimizer, loader)


MIXTURES = {each.__name__: each for each in (launched, started, prepared_loader, prepared_model, set_up_model)}


def fork_case(case, folder):
    """Run a case in a fork; return its report."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / f"{RANK}.json"
    if RANKS > 1:
        # The store of torchrun's agent holds the addresses of the case before.
        os.environ |= {"MASTER_PORT": choose_port(folder / "port"), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    child = os.fork()
    if child == 0:
        try:
            result = MIXTURES[case]() if case in MIXTURES else train_in_turn(case.split(">"))
            report.write_text(json.dumps(result))
        except BaseException:
            report.write_text(json.dumps({"error": traceback.format_exc()[-3000:]}))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return json.loads(report.read_text())


if __name__ == "__main__":
    root, *cases = sys.argv[1:]
    reports = {case: fork_case(case, Path(root, str(number))) for number, case in enumerate(cases)}
    if RANK == 0:
        print(json.dumps(reports), flush=True)
