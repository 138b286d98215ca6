"""`Accelerator`: arguments, properties, small trainings, communication, preparing and unwrapping."""

import copy
import functools
import os
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ParallelismConfig,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from interop.differential.core import Words, probe

BOTH = (1, 2)
COVERED = "accelerator:Accelerator"
PROPERTIES = [
    "context_parallel_rank",
    "data_parallel_rank",
    "data_parallel_shard_rank",
    "deepspeed_plugin",
    "device",
    "dispatch_batches",
    "distributed_type",
    "even_batches",
    "fp8_backend",
    "gradient_accumulation_steps",
    "is_composable_parallelism_enabled",
    "is_fsdp2",
    "is_last_process",
    "is_local_main_process",
    "is_main_process",
    "local_process_index",
    "logging_dir",
    "mixed_precision",
    "multi_device",
    "non_blocking",
    "num_processes",
    "optimizer_step_was_skipped",
    "parallelism_config",
    "pipeline_parallel_rank",
    "process_index",
    "project_dir",
    "save_iteration",
    "should_save_model",
    "split_batches",
    "sync_gradients",
    "tensor_parallel_rank",
    "torch_device_mesh",
    "use_distributed",
    "use_seedable_sampler",
    "use_stateful_dataloader",
]
ATTRIBUTES = [
    "step_scheduler_with_optimizer",
    "rng_types",
    "native_amp",
    "scaler",
    "device_placement",
    "log_with",
    "trackers",
    "step",
    "flag_tensor",
]
ATTRIBUTES += [
    "delayed_fp8_autocast",
    "has_lomo_optimizer",
    "ddp_handler",
    "scaler_handler",
    "init_handler",
    "autocast_handler",
    "profile_handler",
]


def attempt(function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error


def read(item: Any, names: Any) -> dict[str, Any]:
    return {name: attempt(getattr, item, name) for name in names}


def made(**kwargs: Any) -> Accelerator:
    return Accelerator(**{"cpu": True, **kwargs})


def model(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def data(count: int = 12, batch: int = 2, **options: Any) -> DataLoader:
    noise = torch.Generator().manual_seed(2)
    return DataLoader(TensorDataset(torch.randn(count, 3, generator=noise), torch.arange(count) % 2), batch, **options)


def weights(module: nn.Module) -> list[Any]:
    return [round(float(p.detach().double().sum()), 4) for p in module.parameters()]


GIVEN = [
    {},
    {"device_placement": False},
    {"device_placement": True},
    {"split_batches": True},
    {"split_batches": False},
    {"gradient_accumulation_steps": 4},
    {"gradient_accumulation_steps": 0},
    {"gradient_accumulation_steps": -1},
    {"gradient_accumulation_steps": 2.5},
    {"gradient_accumulation_steps": "3"},
    {"gradient_accumulation_steps": None},
    {"cpu": True},
    {"cpu": "yes"},
    {"rng_types": ["torch", "numpy"]},
    {"rng_types": []},
    {"rng_types": ["nonsense"]},
    {"rng_types": "torch"},
    {"project_dir": "here"},
    {"project_dir": ""},
    {"project_dir": 3},
    {"project_config": ProjectConfiguration(project_dir="a", logging_dir="b", iteration=3)},
    {"project_config": ProjectConfiguration(automatic_checkpoint_naming=True)},
    {"project_config": ProjectConfiguration(project_dir="a"), "project_dir": "b"},
    {"project_config": {"project_dir": "a"}},
    {"step_scheduler_with_optimizer": False},
    {"log_with": "nonsense"},
    {"log_with": []},
    {"log_with": None, "project_dir": "x"},
    {"dataloader_config": DataLoaderConfiguration(split_batches=True, even_batches=False)},
    {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True, non_blocking=True)},
    {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=False, use_stateful_dataloader=True)},
    {"dataloader_config": {"split_batches": True}},
    {"dataloader_config": DataLoaderConfiguration(), "split_batches": True},
    {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3)},
    {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3), "gradient_accumulation_steps": 3},
    {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3), "gradient_accumulation_steps": 2},
    {"gradient_accumulation_plugin": 3},
    {"kwargs_handlers": []},
    {"kwargs_handlers": [GradScalerKwargs(init_scale=8.0)]},
    {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]},
    {"kwargs_handlers": [AutocastKwargs(enabled=False), ProfileKwargs(record_shapes=True)]},
    {"kwargs_handlers": [GradScalerKwargs(), GradScalerKwargs()]},
    {"kwargs_handlers": [3]},
    {"kwargs_handlers": GradScalerKwargs()},
    {"dynamo_backend": "no"},
    {"dynamo_backend": "eager"},
    {"dynamo_backend": "nonsense"},
    {"dynamo_plugin": TorchDynamoPlugin(backend="eager")},
    {"dynamo_plugin": TorchDynamoPlugin(), "dynamo_backend": "eager"},
    {"dynamo_plugin": 3},
    {"deepspeed_plugin": 3},
    {"fsdp_plugin": 3},
    {"megatron_lm_plugin": 3},
    {"parallelism_config": 3},
    {"deepspeed_plugins": None},
    {"nonsense": 1},
]


@probe(
    COVERED,
    processes=BOTH,
    given={
        f"{number} {' '.join(given)}": functools.partial(copy.deepcopy, given) for number, given in enumerate(GIVEN)
    },
)
def arguments(given: dict[str, Any]) -> Any:
    return read(made(**given), PROPERTIES + ATTRIBUTES)


@probe(COVERED, processes=BOTH, name=[*PROPERTIES, *ATTRIBUTES])
def property_of(name: str) -> Iterator[tuple[str, Any]]:
    """Reading, assigning and deleting each property and attribute."""
    accelerator = made(mixed_precision="bf16", gradient_accumulation_steps=2)
    yield "read", attempt(getattr, accelerator, name)
    yield "assign", attempt(setattr, accelerator, name, getattr(accelerator, name, None))
    yield "assign another", attempt(setattr, accelerator, name, 2)
    yield "read again", attempt(getattr, accelerator, name)
    yield "class", type(getattr(Accelerator, name, None)).__name__


@probe(
    COVERED,
    precision=Words([None, "no", "bf16", "fp16", "fp8", "NO", "BF16", "Fp16", "FP8", "", "half", 16]),
    environment=[None, "bf16", "BF16", "fp16", "nonsense", ""],
)
def precisions(precision: Any, environment: Any) -> Any:
    if environment is not None:
        os.environ["ACCELERATE_MIXED_PRECISION"] = environment
    accelerator = made(mixed_precision=precision)
    seen = read(accelerator, ["mixed_precision", "native_amp", "fp8_backend"])
    with accelerator.autocast():
        seen["computed in"] = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    return seen


@probe(COVERED, steps=["1", "4", "0", "-2", "x", "", "2.0"], argument=[1, 3])
def accumulation_environment(steps: str, argument: int) -> Any:
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = steps
    return made(gradient_accumulation_steps=argument).gradient_accumulation_steps


OBJECTS = {
    "model": model,
    "optimizer": lambda: torch.optim.SGD(model().parameters(), 0.1),
    "scheduler": lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model().parameters(), 0.1), 1),
    "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(model().parameters(), 0.1)),
    "loader": data,
    "tensor": lambda: torch.ones(2),
    "none": lambda: None,
    "text": lambda: "word",
    "number": lambda: 4,
    "list": lambda: [1],
    "function": lambda: len,
    "frozen": lambda: model().requires_grad_(False),
    "empty": nn.Module,
}


@probe(COVERED, processes=BOTH, what=OBJECTS, placement=[None, True, False], precision=["no", "bf16"])
def prepare_one(what: Any, placement: Any, precision: str) -> Iterator[tuple[str, Any]]:
    accelerator = made(mixed_precision=precision)
    result = attempt(accelerator.prepare, what, device_placement=None if placement is None else [placement])
    yield "class", result if isinstance(result, Exception) else type(result).__name__
    yield "same", result is what
    yield (
        "lists",
        [len(getattr(accelerator, f"_{name}")) for name in ("models", "optimizers", "schedulers", "dataloaders")],
    )
    yield "flag", getattr(result, "_is_accelerate_prepared", None)


@probe(
    COVERED,
    method=["prepare_model", "prepare_optimizer", "prepare_scheduler", "prepare_data_loader", "_prepare_one"],
    what=OBJECTS,
)
def prepare_by_name(method: str, what: Any) -> Iterator[tuple[str, Any]]:
    accelerator = made()
    result = attempt(getattr(accelerator, method), what)
    yield "class", result if isinstance(result, Exception) else type(result).__name__
    yield (
        "lists",
        [len(getattr(accelerator, f"_{name}")) for name in ("models", "optimizers", "schedulers", "dataloaders")],
    )


@probe(COVERED, count=[0, 2, 3], placement=[None, [], [True], [True, False], [True, False, True], True])
def prepare_placement(count: int, placement: Any) -> Any:
    objects = [model(), data(), None][:count]
    result = made().prepare(*objects, device_placement=placement)
    return [type(item).__name__ for item in result] if isinstance(result, (list, tuple)) else type(result).__name__


@probe(COVERED, processes=BOTH, order=["mosl", "lsom", "som", "smo", "om", "o", "mm", "mo"], precision=["no", "fp16"])
def prepare_order(order: str, precision: str) -> Iterator[tuple[str, Any]]:
    accelerator = made(mixed_precision=precision)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    objects = {"m": net, "o": optimizer, "s": schedule, "l": data()}
    found = accelerator.prepare(*[objects[letter] for letter in order])
    found = found if isinstance(found, (list, tuple)) else (found,)
    yield "classes", [type(item).__name__ for item in found]
    yield "tuple", type(found).__name__
    parts = dict(zip(order, found, strict=True))
    if "m" in parts and "o" in parts:
        yield (
            "same parameters",
            {id(p) for p in parts["m"].parameters()} == {id(p) for g in parts["o"].param_groups for p in g["params"]},
        )
    yield (
        "lists",
        [len(getattr(accelerator, f"_{name}")) for name in ("models", "optimizers", "schedulers", "dataloaders")],
    )


@probe(
    COVERED,
    processes=BOTH,
    precision=["no", "bf16", "fp16"],
    keep=[None, True, False],
    compiled=[False],
    training=[True, False],
)
def unwrap(precision: str, keep: Any, compiled: bool, training: bool) -> Iterator[tuple[str, Any]]:
    accelerator = made(mixed_precision=precision)
    net = model()
    prepared = accelerator.prepare_model(net, evaluation_mode=not training)
    more = {} if keep is None else {"keep_fp32_wrapper": keep}
    found = accelerator.unwrap_model(prepared, **more)
    yield "class", (type(prepared).__name__, type(found).__name__)
    yield "same", found is net
    yield "again", accelerator.unwrap_model(found, **more) is net
    yield "output", (prepared(torch.ones(1, 3)).dtype, found(torch.ones(1, 3)).dtype)
    yield (
        "keys",
        [list(accelerator.get_state_dict(item, unwrap=u)) for item in (prepared, found) for u in (True, False)],
    )
    yield "dtypes", {str(v.dtype) for v in accelerator.get_state_dict(prepared).values()}
    yield "in forward", "forward" in vars(found)


@probe(
    COVERED,
    what=["none", "text", "number", "function", "tensor"],
    method=["unwrap_model", "get_state_dict", "verify_device_map", "save_model"],
)
def odd_models(what: str, method: str) -> Any:
    more = ["folder"] if method == "save_model" else []
    return type(getattr(made(), method)(OBJECTS[what](), *more)).__name__


@probe(
    COVERED,
    processes=BOTH,
    precision=["no", "bf16", "fp16"],
    enabled=[True, False, None],
    dtype=[torch.float32, torch.float16, torch.int64],
)
def autocast(precision: str, enabled: Any, dtype: torch.dtype) -> Any:
    accelerator = made(mixed_precision=precision)
    handler = None if enabled is None else AutocastKwargs(enabled=enabled)
    with accelerator.autocast(autocast_handler=handler):
        inputs = torch.ones(2, 2).to(dtype)
        return (
            attempt(lambda: (inputs @ inputs).dtype),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )


@probe(COVERED, processes=BOTH, what=["model", "nothing"], method=["clear", "free_memory"])
def free(what: str, method: str) -> Iterator[tuple[str, Any]]:
    accelerator = made()
    net = model()
    prepared = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), data())
    given = {"none": [], "model": [prepared[0]], "both": list(prepared[:2]), "nothing": [None]}[what]
    yield "returned", getattr(accelerator, method)(*given)
    yield (
        "lists",
        [len(getattr(accelerator, f"_{name}")) for name in ("models", "optimizers", "schedulers", "dataloaders")],
    )
    yield "step", accelerator.step


class Stateful:
    def __init__(self) -> None:
        self.value = 1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@probe(COVERED, what=["stateful", "model", "tensor", "text", "none", "two", "same", "scheduler"])
def register(what: str) -> Iterator[tuple[str, Any]]:
    accelerator, item = made(), Stateful()
    objects = {
        "stateful": [item],
        "two": [item, Stateful()],
        "same": [item, item],
        "tensor": [torch.ones(1)],
        "text": ["x"],
        "none": [None],
    }
    found = objects.get(what) or [OBJECTS[what]()]
    yield "register", attempt(accelerator.register_for_checkpointing, *found)
    yield "count", len(accelerator._custom_objects)


@probe(
    COVERED, method=["register_save_state_pre_hook", "register_load_state_pre_hook"], hook=["function", "none", "text"]
)
def hooks(method: str, hook: str) -> Iterator[tuple[str, Any]]:
    accelerator, calls = made(), []
    handle = attempt(
        getattr(accelerator, method), {"function": lambda *a: calls.append(len(a)), "none": None, "text": "x"}[hook]
    )
    yield "handle", handle if isinstance(handle, Exception) else hasattr(handle, "remove")
    if hook == "function":
        accelerator.prepare(model())
        accelerator.save_state("first")
        accelerator.load_state("first")
        yield "calls", calls
        handle.remove()
        accelerator.save_state("second")
        accelerator.load_state("second")
        yield "removed", calls


@probe(COVERED, prepared=[True, False], rate=[0.1, 0.0])
def lomo(prepared: bool, rate: float) -> Any:
    accelerator = made()
    net = accelerator.prepare(model()) if prepared else model()
    return accelerator.lomo_backward(net(torch.ones(1, 3)).sum(), rate)


@probe(
    COVERED,
    given=[
        {},
        {"buffers": [torch.ones(2, 4)], "buffer_seq_dims": [1]},
        {"buffers": []},
        {"no_restore_buffers": set()},
    ],
)
def context_parallel(given: dict[str, Any]) -> Any:
    with made().maybe_context_parallel(**given) as yielded:
        return yielded


@probe(COVERED)
def ulysses() -> Any:
    loader = data()
    return made().deepspeed_ulysses_dl_adapter(loader, model()) is loader


@probe(
    COVERED,
    handler=[
        None,
        ProfileKwargs(),
        ProfileKwargs(activities=["cpu"], record_shapes=True),
        ProfileKwargs(activities=["nonsense"]),
    ],
)
def profile(handler: Any) -> Any:
    with made().profile(handler) as profiler:
        torch.ones(2, 2).sum()
    return type(profiler).__name__, any("sum" in event.key for event in profiler.key_averages())


@probe(COVERED, way=["copy", "deepcopy", "pickle"], prepared=[True, False])
def copies(way: str, prepared: bool) -> Iterator[tuple[str, Any]]:
    accelerator = made(mixed_precision="bf16", gradient_accumulation_steps=3)
    if prepared:
        accelerator.prepare(model())
    other = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda a: pickle.loads(pickle.dumps(a))}[way](
        accelerator
    )
    yield "class", type(other).__name__
    yield "models", len(other._models)
    yield "read", read(other, PROPERTIES)


@probe(COVERED, first=["no", "bf16"], second=[None, "no", "bf16", "fp16"], processes=BOTH)
def two(first: str, second: Any) -> Iterator[tuple[str, Any]]:
    """A second accelerator in the same process."""
    one = made(mixed_precision=first, gradient_accumulation_steps=2)
    other = attempt(Accelerator, mixed_precision=second)
    yield "built", other if isinstance(other, Exception) else other.mixed_precision
    if not isinstance(other, Exception):
        yield "steps", (one.gradient_accumulation_steps, other.gradient_accumulation_steps)
        yield "state", one.state.__dict__ is other.state.__dict__ or one.state == other.state


@probe(
    COVERED,
    name=[
        "even_batches",
        "scaler",
        "native_amp",
        "ddp_handler",
        "gradient_accumulation_steps",
        "_cp_context",
        "step",
        "anything",
    ],
    value=[None, 2, False],
)
def assigned(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What libraries set from outside."""
    accelerator = made()
    yield "set", attempt(setattr, accelerator, name, value)
    yield "read", attempt(getattr, accelerator, name)
    if name not in ("scaler", "ddp_handler") or value is None:
        yield "prepare", type(attempt(accelerator.prepare, model())).__name__


@probe(
    COVERED,
    sizes=[{}, {"dp_replicate_size": 1}, {"tp_size": 1, "cp_size": 1}, {"tp_size": 2}, {"dp_replicate_size": 2}],
)
def parallelism(sizes: dict[str, int]) -> Any:
    return read(
        made(parallelism_config=ParallelismConfig(**sizes)),
        ["is_composable_parallelism_enabled", "multi_device", "use_distributed"],
    )


@probe(COVERED, seconds=[1, 3600], processes=BOTH)
def group_timeout(seconds: int) -> Any:
    import datetime

    handler = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=seconds))
    if PartialState(cpu=True).num_processes > 1:
        return "a group exists"
    return made(kwargs_handlers=[handler]).init_handler.timeout
