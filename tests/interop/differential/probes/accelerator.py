"""`Accelerator`: arguments, properties, small trainings, communication, preparing and unwrapping."""

import copy
import functools
import pickle

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, utils
from interop.differential.core import BOTH, attempt, probe, properties

COVERED = "accelerator:Accelerator"
PROPERTIES = properties(COVERED)
ATTRIBUTES = [
    "step_scheduler_with_optimizer", "rng_types", "native_amp", "scaler", "device_placement", "log_with", "trackers",
    "step", "flag_tensor", "delayed_fp8_autocast", "has_lomo_optimizer", "ddp_handler", "scaler_handler",
    "init_handler", "autocast_handler", "profile_handler",
]  # fmt: skip


def read(item, names):
    return {name: attempt(getattr, item, name) for name in names}


def made(**kwargs):
    return Accelerator(**{"cpu": True, **kwargs})


def model(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def data(count=12, batch=2, **options):
    noise = torch.Generator().manual_seed(2)
    return DataLoader(TensorDataset(torch.randn(count, 3, generator=noise), torch.arange(count) % 2), batch, **options)


GIVEN = [
    {}, {"gradient_accumulation_steps": -1}, {"rng_types": ["torch", "numpy"]}, {"project_dir": 3},
    {"project_config": utils.ProjectConfiguration(project_dir="a"), "project_dir": "b"},
    {"project_config": {"project_dir": "a"}}, {"log_with": None, "project_dir": "x"},
    {"dataloader_config": utils.DataLoaderConfiguration(dispatch_batches=True, non_blocking=True)},
    {"dataloader_config": utils.DataLoaderConfiguration(), "split_batches": True},
    {"gradient_accumulation_plugin": utils.GradientAccumulationPlugin(num_steps=3), "gradient_accumulation_steps": 2},
    {"kwargs_handlers": [utils.AutocastKwargs(enabled=False), utils.ProfileKwargs(record_shapes=True)]},
    {"dynamo_plugin": utils.TorchDynamoPlugin(), "dynamo_backend": "eager"}, {"deepspeed_plugin": 3},
]  # fmt: skip


@probe(
    COVERED,
    processes=BOTH,
    given={
        f"{number} {' '.join(given)}": functools.partial(copy.deepcopy, given) for number, given in enumerate(GIVEN)
    },
)
def arguments(given):
    return read(made(**given), PROPERTIES + ATTRIBUTES)


@probe(COVERED, count=[0, 2, 3], placement=[None, [], [True], [True, False], [True, False, True], True])
def prepare_placement(count, placement):
    objects = [model(), data(), None][:count]
    result = made().prepare(*objects, device_placement=placement)
    return [type(item).__name__ for item in result] if isinstance(result, (list, tuple)) else type(result).__name__


@probe(COVERED, prepared=[True, False], rate=[0.1, 0.0])
def lomo(prepared, rate):
    accelerator = made()
    net = accelerator.prepare(model()) if prepared else model()
    return accelerator.lomo_backward(net(torch.ones(1, 3)).sum(), rate)


@probe(
    COVERED, handler=[utils.ProfileKwargs(activities=["cpu"], record_shapes=True), utils.ProfileKwargs(activities=["nonsense"])],
)  # fmt: skip
def profile(handler):
    with made().profile(handler) as profiler:
        torch.ones(2, 2).sum()
    return type(profiler).__name__, any("sum" in event.key for event in profiler.key_averages())


@probe(COVERED, way=["copy", "deepcopy", "pickle"], prepared=[True, False])
def copies(way, prepared):
    accelerator = made(mixed_precision="bf16", gradient_accumulation_steps=3)
    if prepared:
        accelerator.prepare(model())
    other = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda a: pickle.loads(pickle.dumps(a))}[way](
        accelerator
    )
    yield "class", type(other).__name__
    yield "models", len(other._models)
    yield "read", read(other, PROPERTIES)
