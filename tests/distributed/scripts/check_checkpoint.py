"""What is saved comes back: training continues as if it had not stopped, also on another number of processes."""

import json
import os
import random

import numpy as np
import torch
from expect import assert_same_everywhere, differing, raised
from harness import Kept, everywhere, fresh_accelerator, learn, shared_folder, world
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accelerate import DataLoaderConfiguration, GradScalerKwargs
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.utils import set_seed

WIDTH = 6


class Job:
    """A training job in which every object and every generator matters: dropout, shuffling, noise of Python and numpy."""

    def __init__(self, precision="no", seed=1, norm=True, **options):
        scaler = GradScalerKwargs(init_scale=64.0, growth_interval=3)
        self.accelerator = fresh_accelerator(mixed_precision=precision, kwargs_handlers=[scaler], **options)
        set_seed(seed, device_specific=True)
        rows = torch.randn(12 * self.accelerator.num_processes, WIDTH, generator=torch.Generator().manual_seed(0))
        middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
        model = nn.Sequential(nn.Linear(WIDTH, 8), middle, nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        loader = DataLoader(rows, batch_size=3, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.counter = Kept(count=0, history=torch.zeros(3))
        self.accelerator.register_for_checkpointing(self.counter)

    def step(self, batch):
        batch = batch + 0.1 * random.random() + 0.1 * np.random.rand()
        with self.accelerator.accumulate(self.model):
            loss = learn(self.accelerator, self.model(batch).pow(2).mean(), self.optimizer, self.scheduler)
        count = self.counter.state["count"] + 1
        self.counter.state = {"count": count, "history": self.counter.state["history"].roll(1) + count}
        return loss

    def steps(self, number):
        for _, batch in zip(range(number), self.loader, strict=False):
            self.step(batch)

    def epoch(self, behind=0):
        """Train on an epoch, or on what it has after some batches, and return the losses."""
        return [self.step(batch) for batch in self.accelerator.skip_first_batches(self.loader, behind)]

    def saved(self, folder):
        self.accelerator.save_state(folder)
        return self.everything()

    def everything(self):
        """Return copies of all that a checkpoint is to bring back, as nested lists, dicts and tensors."""
        scaler = self.accelerator.scaler
        # The statistics of a batch are the main process's: it sends them to the others with the next batch.
        main = self.accelerator.is_main_process
        shared = [name for name in self.model.state_dict() if main or "running" not in name]
        return {
            "model": {name: self.model.state_dict()[name].clone() for name in shared},
            "optimizer": json.loads(json.dumps(self.optimizer.state_dict(), default=lambda t: t.tolist())),
            "scheduler": dict(self.scheduler.state_dict()),
            "scaler": None if scaler is None else dict(scaler.state_dict()),
            "counter": self.counter.state_dict(),
            "step": self.accelerator.step,
            "epoch": self.loader.iteration,
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state()[1].tolist(),
            "python": random.getstate(),
        }


def check_training_continues_as_if_it_had_not_stopped():
    """Saved after an epoch, or within it after some batches."""
    for precision, seedable, behind in (("no", False, 0), ("fp16", False, 0), ("bf16", True, 2)):
        loading = DataLoaderConfiguration(use_seedable_sampler=seedable)
        options = {"precision": precision, "dataloader_config": loading, "gradient_accumulation_steps": 2}
        with shared_folder() as folder:
            whole, losses = Job(**options), []
            saved = whole.saved(folder) if not behind and whole.epoch() else None
            for batch in whole.loader:
                losses.append(whole.step(batch))
                saved = whole.saved(folder) if len(losses) == behind else saved
            following = losses[behind:] + whole.epoch()
            end = whole.everything()
            assert (saved["scaler"] is not None) is (precision == "fp16")
            told = [state["torch"] for state in everywhere(saved)]
            assert all(not torch.equal(told[0], other) for other in told[1:]), "each rank has its own random states"

            resumed = Job(seed=77, **options)
            resumed.epoch()
            assert differing(resumed.everything(), saved)
            resumed.accelerator.load_state(folder)
            assert not (found := differing(resumed.everything(), saved)), (precision, found)
            assert resumed.epoch(behind) + resumed.epoch() == following, precision
            assert not (found := differing(resumed.everything(), end)), (precision, found)
            assert_same_everywhere(list(resumed.model.parameters()))


def check_the_folder_is_that_of_the_peer():
    job = Job("fp16")
    job.epoch()
    inner = job.accelerator.unwrap_model(job.model)
    with shared_folder() as folder:
        returned = job.accelerator.save_state(folder)
        assert os.fspath(returned) == folder
        expected = {"model.safetensors", "optimizer.bin", "scheduler.bin", "scaler.pt", "custom_checkpoint_0.pkl"}
        expected |= {"accelerate_manifest.json", "parameter_names.json"}
        expected |= {"accelerate_manifest_parts"} if world() > 1 else set()
        for rank in range(world()):
            expected.add(f"random_states_{rank}.pkl")
        assert set(os.listdir(folder)) == expected, os.listdir(folder)
        saved = load_file(os.path.join(folder, "model.safetensors"))
        assert sorted(saved) == sorted(inner.state_dict())
        for name in job.everything()["model"]:
            name = name.removeprefix("module.")
            assert torch.equal(saved[name], inner.state_dict()[name].cpu()), name
        job.accelerator.save_state(folder, safe_serialization=False)
        assert set(os.listdir(folder)) == expected - {"model.safetensors"} | {"pytorch_model.bin"}
        job.accelerator.load_state(folder)
    wrapped = isinstance(job.model, DistributedDataParallel)
    assert wrapped is (world() > 1)
    for name in job.accelerator.get_state_dict(job.model, unwrap=False):
        assert name.count("module.") == wrapped, name
    assert list(job.accelerator.get_state_dict(job.model)) == list(inner.state_dict())


def check_a_save_that_fails_on_one_rank_fails_on_all():
    with shared_folder() as folder:
        job = Job()
        if job.accelerator.is_main_process:
            job.counter.saving = OSError("this state cannot be had")
        with raised((OSError, RuntimeError), "this state cannot be had"):
            job.accelerator.save_state(folder)
        # What is there is not taken for a checkpoint.
        job.counter.saving = None
        with raised(DamagedCheckpoint, "the folder is empty"):
            job.accelerator.load_state(folder)
        assert not [name for name in os.listdir(os.path.dirname(folder)) if os.path.basename(folder) + "." in name]
        job.accelerator.save_state(folder)
        job.accelerator.load_state(folder)


def facts(job):
    """Return what does not depend on the number of processes, and this rank's random state."""
    found = job.everything()
    weights = {name.removeprefix("module."): value for name, value in found.pop("model").items()}
    return {name: found[name] for name in ("optimizer", "scheduler", "counter", "epoch")}, weights, found["torch"]


def write(folder):
    job = Job()
    job.epoch()
    job.accelerator.save_state(folder)
    told = everywhere(facts(job))
    if job.accelerator.is_main_process:
        torch.save(told, os.path.join(folder, "facts.pt"))
    job.accelerator.wait_for_everyone()


def read(folder):
    told = torch.load(os.path.join(folder, "facts.pt"))
    job = Job(seed=9)
    rank = job.accelerator.process_index
    job.accelerator.load_state(folder)
    state, weights, generator = facts(job)
    assert not differing(state, told[0][0])
    assert all(torch.equal(value, told[0][1][name]) for name, value in weights.items())
    assert rank >= len(told) or torch.equal(generator, told[rank][2])
    job.epoch()
    assert_same_everywhere(list(job.model.parameters()))


def check_processes_come_and_go():
    """Read what one process left, and leave what one process reads; see `test_checkpoint`."""
    read(os.environ["OF_ONE"])
    write(os.environ["OF_SEVERAL"])
