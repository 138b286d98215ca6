"""Checkpoints of DeepSpeed: exact at the same stage, at another one, on other ranks, and in other strategies; refused in full."""

import itertools
import os
import subprocess
import sys

import torch
from check_deepspeed import STEPS, engines, loader, near, train
from expect import raised
from harness import fresh_engine, rank, shared_folder
from models import WIDTH
from safetensors.torch import load_file
from torch import nn

from accelerate import FullyShardedDataParallelPlugin
from accelerate.checkpoint.layouts import find
from accelerate.checkpoint.manifest import Manifest, problems
from accelerate.checkpoint.optimizers import is_named, named, optimizer_values, read_names
from accelerate.extensions.convert.convert import export, reshard
from accelerate.utils import wait_for_everyone

USUAL = ("check_",)
STAGES = (0, 1, 2, 3)


class Network(nn.Module):
    """It has a tied weight, a frozen one, a buffer, and sizes that two ranks cannot halve."""

    def __init__(self, width=5):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.second = nn.Linear(width, width, bias=False)
        self.third = nn.Linear(width, width, bias=False)
        self.third.weight = self.second.weight
        self.last = nn.Linear(width, 1)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x):
        x = self.second(self.frozen(self.first(x).tanh())).tanh()
        return self.last(self.third(x)) * self.scale[0]


def accelerators(strategy, mixed_precision="no"):
    if strategy in STAGES:
        return engines(strategy, mixed_precision)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if strategy == "fsdp2" else None
    return fresh_engine(fsdp_plugin=plugin, gradient_accumulation_steps=STEPS)


def built(width, changed):
    model = Network(width)
    if changed:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.mul_(2)
    return model


def begun(strategy, width=5, mixed_precision="no", changed=False, teacher=False):
    """A run of a strategy; with `changed` its weights are not those that every run begins with."""
    accelerator = accelerators(strategy, mixed_precision)
    if teacher and strategy == 3:
        accelerator.prepare(built(width, changed), loader())  # an engine without an optimizer
    elif teacher:
        accelerator.prepare_model(built(width, changed), evaluation_mode=True)
    model = built(width, changed)
    ours = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": ours[:2], "weight_decay": 0.1}, {"params": ours[2:], "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=40)
    return accelerator, accelerator.prepare(model, optimizer, scheduler, loader())[:3]


def trained(strategy, folder=None, updates=range(3), **options):
    """Train, save and continue; the losses after the save."""
    accelerator, objects = begun(strategy, **options)
    train(accelerator, *objects, updates=updates)
    if folder:
        accelerator.save_state(folder)
    losses, _ = train(accelerator, *objects, updates=range(3, 6))
    return losses


def gone_on(strategy, folder, **options):
    """Load into a run that began elsewhere, and continue; the losses."""
    accelerator, objects = begun(strategy, changed=True, **options)
    accelerator.load_state(folder)
    for teacher in accelerator._models[:-1]:
        plain = Network().state_dict()
        assert all(plain[name].equal(value) for name, value in (accelerator.get_state_dict(teacher) or {}).items())
    losses, _ = train(accelerator, *objects, updates=range(3, 6))
    return losses


def alone(work):
    """Do something on the first rank while the others wait."""
    if rank() == 0:
        work()
    wait_for_everyone()


def check_a_run_goes_on_where_it_was_saved():
    for stage in (0, 2, 3):
        with shared_folder() as folder:
            accelerator, objects = begun(stage)
            train(accelerator, *objects, updates=range(3))
            accelerator.save_state(f"{folder}/saved", blocking=False)
            wanted = train(accelerator, *objects, updates=range(3, 6))[0]
            accelerator.wait_for_checkpoint()
            assert not problems(f"{folder}/saved", Manifest.read(f"{folder}/saved"), deep=True)
            assert gone_on(stage, f"{folder}/saved") == wanted
            with raised(ValueError, "absent"):
                accelerators(stage).load_state(f"{folder}/absent")


def check_a_stage_goes_on_where_another_was_saved():
    with shared_folder() as folder:
        wanted = {stage: trained(stage, f"{folder}/{stage}") for stage in (0, 1, 3)}
        for source, target in itertools.permutations(wanted, 2):
            near(gone_on(target, f"{folder}/{source}"), wanted[source], 1e-6)


def check_other_strategies_go_on_and_back():
    with shared_folder() as folder:
        for source, target in ((3, "fsdp2"), (2, "ddp"), ("fsdp2", 3), ("ddp", 1), ("ddp", 0)):
            wanted = trained(source, f"{folder}/{source}")
            near(gone_on(target, f"{folder}/{source}"), wanted, 1e-6)


def check_a_model_without_optimizer_does_not_shift_the_optimizers():
    with shared_folder() as folder:
        wanted = {source: trained(source, f"{folder}/{source}", teacher=True) for source in (2, 3, "ddp")}
        alone(lambda: reshard(f"{folder}/3", f"{folder}/full", "full"))
        wanted["full"] = wanted[3]
        for source, target in ((3, 3), (3, 2), (3, "ddp"), (2, 3), ("ddp", 3), ("full", "ddp")):
            near(gone_on(target, f"{folder}/{source}", teacher=True), wanted[source], 1e-6)


def check_bf16_goes_on_at_another_stage():
    with shared_folder() as folder:
        wanted = trained(1, f"{folder}/saved", mixed_precision="bf16")
        assert gone_on(1, f"{folder}/saved", mixed_precision="bf16") == wanted
        near(gone_on(3, f"{folder}/saved", mixed_precision="bf16"), wanted, 1e-2)


def check_resharded_and_exported():
    with shared_folder() as folder:
        for stage in (1, 3):
            accelerator, objects = begun(stage)
            train(accelerator, *objects, updates=range(3))
            accelerator.save_state(f"{folder}/{stage}")
            weights = accelerator.get_state_dict(objects[0]) or {}
            wanted = train(accelerator, *objects, updates=range(3, 6))[0]

            def convert(stage=stage, weights=weights):
                reshard(f"{folder}/{stage}", f"{folder}/{stage}_full", "full")
                reshard(f"{folder}/{stage}", f"{folder}/{stage}_sharded", "sharded", 2)
                export(f"{folder}/{stage}", f"{folder}/{stage}_weights")
                found = load_file(f"{folder}/{stage}_weights/model.safetensors")
                assert set(weights) - set(found) == {"third.weight"}
                for name in found:
                    assert found[name].equal(weights[name]), name
                beside = set(os.listdir(f"{folder}/{stage}_full"))
                assert {"model.safetensors", "optimizer.bin", "scheduler.bin"} <= beside
                assert beside.isdisjoint({"pytorch_model", "latest", "zero_to_fp32.py"})

            alone(convert)
            near(gone_on("ddp", f"{folder}/{stage}_full"), wanted, 1e-6)
            near(gone_on("fsdp2", f"{folder}/{stage}_sharded"), wanted, 1e-6)
            near(gone_on(stage, f"{folder}/{stage}_full"), wanted, 1e-6)


def check_a_refused_load_changes_nothing():
    with shared_folder() as folder:
        trained(1, f"{folder}/1"), trained(3, f"{folder}/3")
        before = sorted(os.listdir(folder))
        for source, target in ((1, 1), (3, 3), (1, 3), (3, 1)):
            accelerator, objects = begun(target, width=4)
            former = accelerator.get_state_dict(objects[0]) or {}
            with raised(RuntimeError, "first.weight has (5, 6) in the checkpoint and (4, 6) in the engine"):
                accelerator.load_state(f"{folder}/{source}")
            after = accelerator.get_state_dict(objects[0]) or {}
            assert all(after[name].equal(value) for name, value in former.items())
            assert sorted(os.listdir(folder)) == before
            train(accelerator, *objects, updates=range(2))


class Own:
    """A class that no reader knows."""


def check_no_code_of_a_file_runs():
    for stage in (0, 1, 3):
        with shared_folder() as folder:
            accelerator, objects = begun(stage)
            train(accelerator, *objects, updates=range(1))
            accelerator.save_state(f"{folder}/saved", client_state={"own": Own()})
            with raised(Exception, "load_kwargs={'weights_only': False}"):
                accelerator.load_state(f"{folder}/saved")
            accelerator.load_state(f"{folder}/saved", load_kwargs={"weights_only": False})


def check_frozen_weights_that_were_left_out_stay():
    for source, target in ((1, 1), (3, 3), (1, 3), (3, 1)):
        with shared_folder() as folder:
            accelerator, objects = begun(source)
            train(accelerator, *objects, updates=range(3))
            accelerator.save_state(f"{folder}/saved", exclude_frozen_parameters=True)
            kept = accelerator.get_state_dict(objects[0]) or {}
            accelerator, objects = begun(target, changed=True)
            accelerator.load_state(f"{folder}/saved")
            state = accelerator.get_state_dict(objects[0]) or {}
            for name, value in state.items() if rank() == 0 else ():
                assert value.equal(2 * kept[name] if name.startswith("frozen") else kept[name]), name


def check_deepspeeds_own_script_reads_it():
    for stage in (2, 3):
        with shared_folder() as folder:
            accelerator, objects = begun(stage)
            train(accelerator, *objects, updates=range(2))
            accelerator.save_state(f"{folder}/saved")
            weights = accelerator.get_state_dict(objects[0]) or {}

            def merge(weights=weights):
                command = [sys.executable, "zero_to_fp32.py", ".", "out"]
                subprocess.run(command, cwd=f"{folder}/saved", check=True, capture_output=True)
                found = torch.load(f"{folder}/saved/out/pytorch_model.bin")
                for name, value in weights.items():
                    assert found[name].equal(value), name

            alone(merge)


def check_save_model_in_16_bits():
    with shared_folder() as folder:
        accelerator, objects = begun(3, mixed_precision="bf16")
        accelerator.save_model(objects[0], folder)

        def look():
            found = load_file(f"{folder}/model.safetensors")
            assert {value.dtype for name, value in found.items() if name != "scale"} == {torch.bfloat16}
            near(found["first.weight"].tolist(), Network().first.weight.tolist(), 1e-2)

        alone(look)


def saved_here():
    for stage in (0, 1, 3):
        trained(stage, f"saved_{stage}")


def loaded_here():
    """Load what other numbers of ranks saved, at each stage: the same weights and moments."""
    others = sorted(name for name in os.listdir() if name.startswith("saved_"))
    assert others, "nothing was saved"
    before = sorted(os.listdir())
    for name, target in itertools.product(others, (0, 1, 3)):
        accelerator, (model, _, _) = begun(target, changed=True)
        accelerator.load_state(name)
        weights = accelerator.get_state_dict(model) or {}
        accelerator.save_state("again")

        def compare(name=name, weights=weights):
            def read(folder):
                stored = find(folder, "optimizer").open()
                values = optimizer_values(stored)
                if not is_named(values):
                    values = named(values, [one for group in read_names(folder) for one in group])
                return find(folder, "model").open(), stored, stored.read(values)

            (there, _, old), (here, _, new) = read(name), read("again")
            old_weights, new_weights = there.read(there.state), here.read(here.state)
            for key, value in old_weights.items():
                assert value.equal(new_weights[key]) and value.equal(weights[key]), (name, key)
            assert old["state"].keys() == new["state"].keys()
            for key, state in old["state"].items():
                assert all(value.equal(new["state"][key][what]) for what, value in state.items()), (name, key)
            assert [dict(group) for group in old["param_groups"]] == [dict(group) for group in new["param_groups"]]

        alone(compare)
    assert sorted({*os.listdir()} - {"again"}) == before
