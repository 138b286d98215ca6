"""Checkpoints of transformers' Trainer on several ranks: next to the stock Trainer's, and where a rank, or the disk, fails.

`trainer_checkpoints.py FOLDER [DISK]`, or `--resume FOLDER` for a run that others have begun; DISK is a small file system, which two checkpoints do not fit on.
"""

import os
import shutil
import sys
import time

import torch
from tiny import everywhere, losses, report
from transformers import Trainer, TrainingArguments, set_seed

import transformers_patch
from accelerate.checkpoint.manifest import Manifest
from transformers_patch.checkpoints import CheckpointMixin, choose

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Regression(torch.nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        layers = torch.nn.Linear(4, width), torch.nn.Dropout(dropout), torch.nn.Linear(width, 1)
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x, labels):
        found = self.layers(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


class Exact(Trainer):
    def training_step(self, *args, **options):
        loss = super().training_step(*args, **options)
        self.losses = [*getattr(self, "losses", []), loss.item().hex()]
        return loss


class Own(CheckpointMixin, Exact):
    pass


class WritesOnAllRanks(Own):
    """As sentence-transformers' trainer does: the last writer's file counts."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        torch.save({"rank": RANK}, f"{output_dir}/extra.pt")


class Fails(Own):
    """Rank 1 cannot write its generators at step 4."""

    def _save_rng_state(self, folder):
        if self.state.global_step == 4 and RANK == WORLD - 1:
            raise OSError(5, "Input/output error", folder)
        super()._save_rng_state(folder)


def build(folder, kind, width=8, dropout=0.3, **options):
    set_seed(7)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=draw)
    values = {
        "per_device_train_batch_size": 4, "max_steps": 8, "save_steps": 2, "logging_steps": 1, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "seed": 3, "learning_rate": 0.01,
    }  # fmt: skip
    arguments = TrainingArguments(folder, **{**values, **options})
    return kind(Regression(width, dropout), arguments, train_dataset=[{"x": row, "labels": row.sum()} for row in x])


def train(folder, kind, resume=None, **options):
    trainer = build(folder, kind, **options)
    trainer.train(resume_from_checkpoint=resume)
    return everywhere(trainer.losses)


def refused(folder, kind, resume=None, **options):
    trainer, began = build(folder, kind, **options), time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=resume)
        problem = "nothing"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    assert time.monotonic() - began < 60
    return everywhere(problem)


def names(folder):
    return sorted(os.listdir(folder))


def begun(folder):
    """Train to the end, and take the second half back; return its folder and its losses."""
    trainer = build(folder, Own, dropout=0.0)
    trainer.train()
    everywhere(None)
    if RANK == 0:
        for step in (6, 8):
            shutil.rmtree(f"{folder}/checkpoint-{step}")
    everywhere(None)
    return folder, losses(trainer)[4:]


def resume(folder):
    trainer = build(folder, Own, dropout=0.0)
    trainer.train(resume_from_checkpoint=True)
    steps = trainer.args.gradient_accumulation_steps
    report(losses=losses(trainer)[4:], accumulation=steps, epoch=trainer.state.epoch)


def main(root, disk=None):
    found = {}
    stock, ours = f"{root}/stock", f"{root}/ours"
    whole = train(stock, Exact)
    found["same losses"] = train(ours, Own) == whole
    found["names"] = [names(f"{stock}/checkpoint-8"), names(f"{ours}/checkpoint-8")]
    found["world size"] = Manifest.read(f"{ours}/checkpoint-8").world_size
    rest = [of_rank[4:] for of_rank in whole]
    found["ours from stock"] = train(stock, Own, f"{stock}/checkpoint-4") == rest
    found["stock from ours"] = train(ours, Exact, f"{ours}/checkpoint-4") == rest
    train(f"{root}/all", WritesOnAllRanks, save_steps=1, save_total_limit=8)
    found["all ranks write"] = [choose.flaw(f"{root}/all/{name}", deep=True) for name in names(f"{root}/all")]
    found["a rank fails"] = refused(f"{root}/fails", Fails)
    found["after it"] = names(f"{root}/fails")
    found["continues"] = train(f"{root}/fails", Own, True) == [of_rank[2:] for of_rank in whole]
    if RANK == WORLD - 1:
        isdir = os.path.isdir
        choose.os.path.isdir = lambda path: path != f"{ours}/checkpoint-4" and isdir(path)
    found["a rank without the folder"] = refused(ours, Own, f"{ours}/checkpoint-4")
    if RANK == WORLD - 1:
        choose.os.path.isdir = isdir
    if RANK == 0:
        with open(f"{ours}/checkpoint-6/optimizer.pt", "r+b") as file:
            file.truncate(100)
    found["damaged"] = refused(ours, Own, f"{ours}/checkpoint-6")
    with transformers_patch.applied(checkpoints=True):
        found["patched"] = train(f"{root}/patched", Exact, save_total_limit=1) == whole
        found["rotated"] = names(f"{root}/patched")
    found["fewer ranks"] = begun(f"{root}/fewer")
    if disk:
        found["full disk"] = refused(f"{disk}/run", Own, width=5000, save_total_limit=1)
        found["kept"] = names(f"{disk}/run")
        if RANK == 0:
            shutil.copytree(f"{disk}/run", f"{root}/moved")
        everywhere(None)
        whole = train(f"{root}/wide", Own, width=5000)
        found["kept one continues"] = train(f"{root}/moved", Own, True, width=5000) == [
            of_rank[2:] for of_rank in whole
        ]
    report(**found)


if sys.argv[1] == "--resume":
    resume(sys.argv[2])
else:
    main(*sys.argv[1:])
