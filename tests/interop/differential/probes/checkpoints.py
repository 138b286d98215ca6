"""Checkpoints: files, their names and content, what loading restores, hooks and automatic naming."""

import contextlib
import functools
import os
import pathlib
import random

import numpy as np
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, checkpointing
from accelerate.state import PartialState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from interop.differential.core import BOTH, attempt, probe

OURS = (
    "accelerate_manifest",
    "generators_",
    "parameter_names.json",
)  # files that this package adds; docs/differences.md has a row for each
PUBLIC = "accelerator:Accelerator"


@contextlib.contextmanager
def one_folder():
    folder, here = [os.getcwd()], os.getcwd()
    several = PartialState(cpu=True).num_processes > 1
    if several:
        torch.distributed.broadcast_object_list(folder)
        os.chdir(folder[0])
    try:
        yield
    finally:
        if several:
            torch.distributed.barrier()
            os.chdir(here)


def together(function):
    """Let a probe, which yields, run in one folder."""

    @functools.wraps(function)
    def run(**kwargs):
        with one_folder():
            yield from function(**kwargs)

    return run


def files(folder="."):
    found = (path.relative_to(folder) for path in pathlib.Path(folder).rglob("*") if path.is_file())
    return sorted(str(path) for path in found if not any(part.startswith(OURS) for part in path.parts))


def content(path):
    if path.suffix == ".safetensors":
        with safetensors.safe_open(path, "pt") as opened:
            return {"metadata": opened.metadata(), **{key: opened.get_tensor(key) for key in sorted(opened.keys())}}
    return path.read_text() if path.suffix == ".json" else torch.load(path, weights_only=False)


def shown(state):
    """Omit what differs from run to run, or is a random state in full."""
    if isinstance(state, dict):
        return {key: shown(value) for key, value in state.items() if key != "saved_at"}
    if isinstance(state, (tuple, list)) and len(state) > 50:
        return type(state).__name__, len(state)
    return type(state)(map(shown, state)) if type(state) in (tuple, list) else state


def model(kind="plain"):
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    if kind == "tied":
        made = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        made[1].weight = made[0].weight
    return made.half() if kind == "half" else made


def data(count=8):
    return DataLoader(TensorDataset(torch.arange(3.0 * count).reshape(count, 3)), 2, shuffle=True)


OPTIMIZERS = {"SGD": {"momentum": 0.9}, "AdamW": {}, "none": {}}


def trained(accelerator, optimizer, steps=2, kind="plain"):
    net = model(kind)
    if optimizer == "none":
        return (accelerator.prepare(net),)
    rule = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1, **OPTIMIZERS[optimizer])
    schedule = torch.optim.lr_scheduler.StepLR(rule, 1, gamma=0.5)
    parts = accelerator.prepare(net, rule, data(), schedule)
    for _, (batch,) in zip(range(steps), parts[2], strict=False):
        accelerator.backward(parts[0](batch).sum())
        parts[1].step()
        parts[3].step()
        parts[1].zero_grad()
    return parts


class Counter:
    def __init__(self, value=1):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@probe(
    PUBLIC, "checkpointing:save_accelerator_state", processes=BOTH, optimizer=list(OPTIMIZERS), precision=["bf16"],
    safe=[True, False], seedable=[True, False], stateful=[False, True],
)  # fmt: skip
@together
def saved(optimizer, precision, safe, seedable, stateful):
    settings = DataLoaderConfiguration(use_seedable_sampler=seedable, use_stateful_dataloader=stateful)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, dataloader_config=settings)
    trained(accelerator, optimizer)
    accelerator.register_for_checkpointing(Counter(), Counter({"deep": [1, None]}))
    accelerator.save_state("folder", safe_serialization=safe)
    accelerator.wait_for_everyone()
    yield "files", files("folder")
    for path in sorted(pathlib.Path("folder").iterdir()) if accelerator.is_main_process else []:
        if path.name.startswith(OURS) or path.name.startswith(("random_states", "dl_state", "sampler")):
            continue
        yield path.name, attempt(lambda path=path: shown(content(path)))
    for path in sorted(pathlib.Path("folder").glob("random_states*")) if accelerator.is_main_process else []:
        yield path.name, sorted(set(content(path)) - {"dataloader_positions"})  # the positions are this package's
    for path in sorted(pathlib.Path("folder").glob("sampler*")) if accelerator.is_main_process else []:
        sampler = content(path)
        yield path.name, (type(sampler).__module__, type(sampler).__name__, sampler.epoch, len(sampler))


@probe(
    PUBLIC, "checkpointing:load_accelerator_state", processes=BOTH, optimizer=list(OPTIMIZERS),
    precision=["no", "fp16"], safe=[True, False],
)  # fmt: skip
@together
def loaded(optimizer, precision, safe):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    parts, counter = trained(accelerator, optimizer), Counter(7)
    accelerator.register_for_checkpointing(counter)
    accelerator.save_state("folder", safe_serialization=safe)
    accelerator.wait_for_everyone()
    want = [p.detach().clone() for p in parts[0].parameters()]
    drawn = (random.random(), float(np.random.rand()), torch.rand(1).item())
    rate = parts[3].get_last_lr() if len(parts) > 1 else None
    with torch.no_grad():
        for p in parts[0].parameters():
            p.zero_()
    if len(parts) > 1:
        parts[1].param_groups[0]["lr"] = 9.0
    counter.value = 0
    yield "returned", type(attempt(accelerator.load_state, "folder")).__name__
    yield "weights", all(torch.equal(a, b) for a, b in zip(want, parts[0].parameters(), strict=True))
    yield "object", counter.value
    yield "rate", parts[1].param_groups[0]["lr"] == rate[0] if rate else None
    yield "drawn", drawn == (random.random(), float(np.random.rand()), torch.rand(1).item())


@probe(PUBLIC, folder=["nowhere", "", None, 3, "file", "empty"], method=["load_state", "save_state"])
def places(folder, method):
    accelerator = Accelerator(cpu=True)
    trained(accelerator, "SGD")
    pathlib.Path("file").write_text("x")
    pathlib.Path("empty").mkdir()
    getattr(accelerator, method)(folder)
    return files()


@probe(
    PUBLIC, processes=BOTH, count=[1, 3], limit=[None, 1, 2, 0], start=[0, 5], through=["naming", "nested/folder"],
)  # fmt: skip
@together
def naming(count, limit, start, through):
    if limit and PartialState(cpu=True).num_processes > 1:
        return  # 1.15.0 removes on one rank what another one is about to look for
    naming = through == "naming"
    config = ProjectConfiguration(
        project_dir="project", automatic_checkpoint_naming=naming, total_limit=limit, iteration=start
    )
    accelerator = Accelerator(cpu=True, project_config=config)
    trained(accelerator, "none")
    returned = [attempt(accelerator.save_state, None if naming else through) for _ in range(count)]
    accelerator.wait_for_everyone()
    yield "returned", [str(item) for item in returned] if accelerator.is_main_process else None
    yield "folders", sorted({str(pathlib.Path(name).parent) for name in files()})
    yield "iteration", accelerator.save_iteration
    yield "load", type(attempt(accelerator.load_state) if naming else None).__name__


@probe(
    "checkpointing:load_accelerator_state",
    given=[
        {"map_location": "cpu"}, {"map_location": None}, {"map_location": "on_device"}, {"map_location": "x"},
        {"map_location": "meta"}, {"load_kwargs": {"weights_only": True}}, {"load_kwargs": {}}, {"strict": False},
        {"strict": True}, {"nonsense": 1},
    ],
)  # fmt: skip
def load_given(given):
    PartialState(cpu=True)
    pathlib.Path("folder").mkdir()
    checkpointing.save_accelerator_state("folder", [model().state_dict()], [], [], [], 0, 3)
    net = model()
    torch.nn.init.zeros_(net[0].weight)
    yield "returned", attempt(checkpointing.load_accelerator_state, "folder", [net], [], [], [], 0, **given)
    yield "weights", net[0].weight


@probe(PUBLIC, read=[0, 1, 3, 4], stateful=[True, False])
def going_on(read, stateful):
    settings = DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=True, data_seed=3)
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    loader = accelerator.prepare(data())
    batches = iter(loader)
    yield "before", [next(batches)[0].tolist() for _ in range(read)]
    accelerator.save_state("folder")
    rest = [batch.tolist() for (batch,) in batches]
    accelerator.load_state("folder")
    again = [batch.tolist() for (batch,) in loader]
    yield "the same rest", again == rest
    yield "length", len(again)


@probe(PUBLIC, changed=["models", "optimizers", "objects"], more=[True, False])
def other_number(changed, more):
    accelerator = Accelerator(cpu=True)
    trained(accelerator, "SGD")
    accelerator.register_for_checkpointing(Counter())
    accelerator.save_state("folder")
    for path in pathlib.Path("folder").iterdir():
        if path.name.startswith(OURS):
            path.unlink()
    kinds = {"models": model, "optimizers": lambda: torch.optim.SGD(model().parameters(), 0.1), "objects": Counter}
    if more and changed != "objects":
        accelerator.prepare(kinds[changed]())
    elif more:
        accelerator.register_for_checkpointing(Counter())
    else:
        {"models": accelerator._models, "optimizers": accelerator._optimizers, "objects": accelerator._custom_objects}[
            changed
        ].clear()
    accelerator.load_state("folder")


@probe(PUBLIC, folder=["a/b/c", "file", "", None], what=["model", "none", "state"])
def model_places(folder, what):
    accelerator = Accelerator(cpu=True)
    pathlib.Path("file").write_text("x")
    given = {"model": model(), "none": None, "state": model().state_dict()}[what]
    yield "returned", attempt(accelerator.save_model, given, folder)
    yield "files", files()
