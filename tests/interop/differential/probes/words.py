"""The words that string parameters of `Accelerator` and its states take, and settings beside them."""

from typing import Any

import torch

from accelerate import Accelerator, DataLoaderConfiguration, DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import dataclasses
from interop.differential.core import Words, describe, probe
from interop.differential.probes.plugins import EDGES, SWITCHES, fields_of, plain

ACCELERATOR = ("accelerator:Accelerator", "state:AcceleratorState", "state:PartialState", "state:GradientState")
PRECISIONS = Words(
    [None, "no", "NO", "fp16", "FP16", "bf16", "BF16", "fp8", "FP8", "fp32", "float16", "", "nonsense", 16, True]
)
PRECISIONS += [dataclasses.PrecisionType.BF16, dataclasses.PrecisionType.NO, torch.float16]
TRACKERS = "all aim tensorboard wandb trackio comet_ml mlflow clearml dvclive swanlab Tensorboard TENSORBOARD COMETML nonsense".split()  # noqa: SIM905
RNGS = [
    [],
    ["torch"],
    ["generator"],
    ["cuda"],
    ["torch", "generator"],
    ["TORCH"],
    ["python"],
    ["numpy"],
    ["xla"],
    ["nonsense"],
    [""],
]
RNGS += ["torch", "generator", None, [dataclasses.RNGType.TORCH], [1], ("torch",), {"torch"}]
BACKENDS = "no eager aot_eager inductor aot_ts_nvfuser nvprims_nvfuser cudagraphs ofi fx2trt onnxrt tensorrt tvm hpu_backend neuron".split()  # noqa: SIM905
BACKENDS += [
    "aot_torchxla_trace_once",
    "torchxla_trace_once",
    "torhchxla_trace_once",
    "INDUCTOR",
    "Eager",
    "",
    "nonsense",
    None,
    1,
]


def seen(accelerator: Accelerator) -> dict[str, Any]:
    """Return what a script reads from it."""
    state = accelerator.state
    return {
        "mixed_precision": [accelerator.mixed_precision, state.mixed_precision, accelerator.native_amp],
        "scaler": type(accelerator.scaler).__name__,
        "rng_types": list(accelerator.rng_types),
        "log_with": accelerator.log_with,
        "step_scheduler": accelerator.step_scheduler_with_optimizer,
        "device_placement": accelerator.device_placement,
        "loaders": [
            getattr(accelerator, name)
            for name in ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
        ],
        "more loaders": [
            getattr(accelerator, name, "<absent>") for name in ("non_blocking", "use_stateful_dataloader")
        ],
        "accumulation": accelerator.gradient_accumulation_steps,
        "dynamo": fields_of(state.dynamo_plugin),
        "device": accelerator.device,
        "project": [accelerator.project_dir, accelerator.logging_dir, accelerator.save_iteration],
        "distributed_type": accelerator.distributed_type,
        "flags": [
            accelerator.is_main_process,
            accelerator.is_last_process,
            accelerator.use_distributed,
            accelerator.multi_device,
        ],
        "compilation": getattr(accelerator, "has_compiled_regions", "<absent>"),
        "fp8_backend": accelerator.fp8_backend,
        "handlers": [type(getattr(accelerator, f"{name}_handler", None)).__name__ for name in HANDLERS],
    }


HANDLERS = ("autocast", "ddp", "scaler", "init", "fp8_recipe", "te_recipe", "msamp_recipe", "ao_recipe", "profile")
GIVEN: dict[str, list[Any]] = {
    "mixed_precision": PRECISIONS,
    "rng_types": RNGS,
    "dynamo_backend": BACKENDS,
    "log_with": Words(
        [None, *TRACKERS, [], ["tensorboard"], ["nonsense"], ["tensorboard", "tensorboard"], ["all"], 1, ""]
    ),
    "device_placement": SWITCHES,
    "split_batches": SWITCHES,
    "step_scheduler_with_optimizer": SWITCHES,
    "cpu": SWITCHES,
    "gradient_accumulation_steps": EDGES,
    "project_dir": Words([None, "", "a", "ä/b", 1]),
    "dispatch_batches": SWITCHES,
    "even_batches": SWITCHES,
    "use_seedable_sampler": SWITCHES,
    "fsdp_plugin": [None, "nonsense", 1],
    "deepspeed_plugin": ["nonsense", 1, None],
    "deepspeed_plugins": ["nonsense", {}, None],
    "megatron_lm_plugin": ["nonsense", None],
    "torch_tp_plugin": [None, "nonsense"],
    "parallelism_config": [None, "nonsense", 1],
    "no_such_argument": [1],
}


def register(name: str, values: Any) -> None:
    """Probe one argument of `Accelerator`."""

    def run(value: object) -> dict[str, Any]:
        return seen(Accelerator(**{name: value}))

    run.__name__ = f"accelerator_{name}"
    probe(*ACCELERATOR, value=values)(run)


HANDLED: dict[str, Any] = {
    "none": lambda: None,
    "empty": list,
    "autocast": lambda: [dataclasses.AutocastKwargs(enabled=False)],
    "scaler": lambda: [dataclasses.GradScalerKwargs(init_scale=2.0)],
    "ddp": lambda: [dataclasses.DistributedDataParallelKwargs(find_unused_parameters=True)],
    "profile": lambda: [dataclasses.ProfileKwargs(with_flops=True)],
    "several": lambda: [dataclasses.AutocastKwargs(), dataclasses.ProfileKwargs(), dataclasses.GradScalerKwargs()],
    "twice": lambda: [dataclasses.AutocastKwargs(), dataclasses.AutocastKwargs()],
    "ao": lambda: [dataclasses.AORecipeKwargs()],
    "msamp": lambda: [dataclasses.MSAMPRecipeKwargs()],
    "two recipes": lambda: [dataclasses.AORecipeKwargs(), dataclasses.MSAMPRecipeKwargs()],
    "texts": lambda: ["nonsense"],
    "text": lambda: "nonsense",
    "number": lambda: [1],
    "base": lambda: [dataclasses.KwargsHandler()],
    "tuple": lambda: (dataclasses.AutocastKwargs(),),
    "class": lambda: [dataclasses.AutocastKwargs],
    "init": lambda: [dataclasses.InitProcessGroupKwargs()],
    "accumulation": lambda: [dataclasses.GradientAccumulationPlugin(num_steps=2)],
}


@probe(*ACCELERATOR, handlers=HANDLED, precision=["no", "bf16", "fp8"])
def handlers(handlers: Any, precision: str) -> Any:
    return seen(Accelerator(kwargs_handlers=handlers, mixed_precision=precision))


OBJECTS: dict[str, dict[str, Any]] = {
    "project_config": {
        "folder": lambda: dataclasses.ProjectConfiguration("a"),
        "logs": lambda: dataclasses.ProjectConfiguration(logging_dir="b"),
        "numbered": lambda: dataclasses.ProjectConfiguration("a", automatic_checkpoint_naming=True, iteration=3),
    },
    "dataloader_config": {
        "split": lambda: DataLoaderConfiguration(split_batches=True),
        "rest": lambda: DataLoaderConfiguration(non_blocking=True, use_seedable_sampler=True, even_batches=False),
    },
    "gradient_accumulation_plugin": {
        "three": lambda: dataclasses.GradientAccumulationPlugin(num_steps=3),
        "bare": dataclasses.GradientAccumulationPlugin,
    },
    "dynamo_plugin": {"eager": lambda: dataclasses.TorchDynamoPlugin(backend="eager", mode="default")},
}
for name_, made_ in OBJECTS.items():
    register(name_, {**made_, "none": lambda: None, "text": lambda: "nonsense", "number": lambda: 1})
for name_, values_ in GIVEN.items():
    register(name_, values_)


@probe(
    *ACCELERATOR,
    precision=["no", "fp16", "bf16"],
    log_with=[None, "tensorboard"],
    steps=[1, 3],
    split=[True, False],
    rng=[None, ["torch"]],
)
def combined(precision: str, log_with: Any, steps: int, split: bool, rng: Any) -> Any:
    """Several arguments at a time, with a folder that trackers need."""
    return seen(
        Accelerator(
            mixed_precision=precision,
            log_with=log_with,
            project_dir="runs",
            gradient_accumulation_steps=steps,
            dataloader_config=DataLoaderConfiguration(split_batches=split),
            rng_types=rng,
        )
    )


@probe("accelerator:Accelerator", first=PRECISIONS[:8], second=["no", "bf16", "fp16", None])
def precision_of_a_second(first: Any, second: Any) -> Any:
    """A second `Accelerator` beside the first."""
    one = Accelerator(mixed_precision=first)
    other = Accelerator(mixed_precision=second)
    return [one.mixed_precision, other.mixed_precision, type(other.scaler).__name__]


@probe("state:AcceleratorState", precision=PRECISIONS, cpu=[True, False])
def state_precision(precision: Any, cpu: bool) -> Any:
    state = AcceleratorState(precision, cpu, dataclasses.TorchDynamoPlugin(), _from_accelerator=True)
    return [state.mixed_precision, state._mixed_precision, state.device, state.distributed_type, state.initialized]


@probe("state:PartialState", cpu=SWITCHES, backend=Words([None, "gloo", "nccl", "GLOO", "", "nonsense", 1]))
def partial_backend(cpu: Any, backend: Any) -> Any:
    state = PartialState(cpu=cpu, backend=backend)
    return [state.backend, state.device, state.distributed_type, state.num_processes]


@probe(
    "state:GradientState",
    name=["num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch"],
    value=[None, True, False, 2, "x"],
)
def gradient_settings(name: str, value: Any) -> Any:
    state = GradientState(dataclasses.GradientAccumulationPlugin(**{name: value}))
    return [
        state.num_steps,
        state.adjust_scheduler,
        state.sync_with_dataloader,
        state.sync_each_batch,
        state.sync_gradients,
    ]


@probe(
    *ACCELERATOR,
    to=Words(["MULTI_GPU", "multi_gpu", "FSDP", "NO", "", "nonsense", DistributedType.DEEPSPEED]),
    on=["partial", "accelerator"],
)
def assigned_type(to: Any, on: str) -> Any:
    """Libraries assign another type to a state."""
    accelerator = Accelerator()
    state = PartialState() if on == "partial" else accelerator.state
    state.distributed_type = to
    return [
        describe(accelerator.distributed_type),
        accelerator.use_distributed,
        plain(accelerator.state.mixed_precision),
    ]


@probe(
    "accelerator:Accelerator",
    kind=Words(["no", "bf16", "fp16"]),
    enabled=[True, False, None],
    cache=[None, True, False],
)
def autocast(kind: str, enabled: Any, cache: Any) -> Any:
    """What computations inside `autocast` give."""
    accelerator = Accelerator(mixed_precision=kind)
    handler = None if enabled is None else dataclasses.AutocastKwargs(enabled=enabled, cache_enabled=cache)
    with accelerator.autocast(autocast_handler=handler):
        return [
            (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        ]
