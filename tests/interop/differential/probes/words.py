"""The words that string parameters of `Accelerator` and its states take, and settings next to them."""

import torch

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import PartialState
from accelerate.utils import dataclasses
from interop.differential.core import Words, probe, words
from interop.differential.probes.plugins import EDGES, SWITCHES, fields_of

ACCELERATOR = ("accelerator:Accelerator", "state:AcceleratorState", "state:PartialState", "state:GradientState")
PRECISIONS = words("no NO fp16 FP16 bf16 BF16 fp8 FP8 fp32 float16 nonsense", None, "", 16, True)
PRECISIONS += [dataclasses.PrecisionType.BF16, dataclasses.PrecisionType.NO, torch.float16]
TRACKERS = "all aim tensorboard wandb trackio comet_ml mlflow clearml dvclive swanlab Tensorboard TENSORBOARD COMETML nonsense".split()  # noqa: SIM905
RNGS = [
    [], ["torch"], ["generator"], ["cuda"], ["torch", "generator"], ["TORCH"], ["python"], ["numpy"], ["xla"],
    ["nonsense"], [""],
]  # fmt: skip
RNGS += ["torch", "generator", None, [dataclasses.RNGType.TORCH], [1], ("torch",), {"torch"}]
BACKENDS = "no eager aot_eager inductor aot_ts_nvfuser nvprims_nvfuser cudagraphs ofi fx2trt onnxrt tensorrt tvm hpu_backend neuron".split()  # noqa: SIM905
BACKENDS += [
    "aot_torchxla_trace_once", "torchxla_trace_once", "torhchxla_trace_once", "INDUCTOR", "Eager", "", "nonsense",
    None, 1,
]  # fmt: skip


HANDLERS = ("autocast", "ddp", "scaler", "init", "fp8_recipe", "te_recipe", "msamp_recipe", "ao_recipe", "profile")
SEEN = (
    "native_amp log_with step_scheduler_with_optimizer device_placement split_batches dispatch_batches even_batches "
    "use_seedable_sampler gradient_accumulation_steps device project_dir logging_dir save_iteration distributed_type "
    "is_main_process is_last_process use_distributed multi_device fp8_backend"
)
MAY_LACK = ("non_blocking", "use_stateful_dataloader", "has_compiled_regions")


def seen(accelerator):
    state = accelerator.state
    return {
        **{name: getattr(accelerator, name) for name in SEEN.split()},
        **{name: getattr(accelerator, name, "<absent>") for name in MAY_LACK},
        "mixed_precision": [accelerator.mixed_precision, state.mixed_precision],
        "scaler": type(accelerator.scaler).__name__,
        "rng_types": list(accelerator.rng_types),
        "dynamo": fields_of(state.dynamo_plugin),
        "handlers": [type(getattr(accelerator, f"{name}_handler", None)).__name__ for name in HANDLERS],
    }


GIVEN = {
    "mixed_precision": PRECISIONS, "rng_types": RNGS, "dynamo_backend": BACKENDS,
    "log_with": Words(
        [None, *TRACKERS, [], ["tensorboard"], ["nonsense"], ["tensorboard", "tensorboard"], ["all"], 1, ""],
    ), "device_placement": SWITCHES, "split_batches": SWITCHES, "step_scheduler_with_optimizer": SWITCHES,
    "cpu": SWITCHES, "gradient_accumulation_steps": EDGES, "project_dir": Words([None, "", "a", "ä/b", 1]),
    "dispatch_batches": SWITCHES, "even_batches": SWITCHES, "use_seedable_sampler": SWITCHES,
    "fsdp_plugin": [None, "nonsense", 1], "deepspeed_plugin": ["nonsense", 1, None],
    "deepspeed_plugins": ["nonsense", {}, None], "megatron_lm_plugin": ["nonsense", None],
    "torch_tp_plugin": [None, "nonsense"], "parallelism_config": [None, "nonsense", 1], "no_such_argument": [1],
}  # fmt: skip


def register(name, values):
    def run(value):
        return seen(Accelerator(**{name: value}))

    run.__name__ = f"accelerator_{name}"
    probe(*ACCELERATOR, value=values)(run)


HANDLED = {
    "none": lambda: None, "empty": list, "autocast": lambda: [dataclasses.AutocastKwargs(enabled=False)],
    "scaler": lambda: [dataclasses.GradScalerKwargs(init_scale=2.0)],
    "ddp": lambda: [dataclasses.DistributedDataParallelKwargs(find_unused_parameters=True)],
    "profile": lambda: [dataclasses.ProfileKwargs(with_flops=True)],
    "several": lambda: [dataclasses.AutocastKwargs(), dataclasses.ProfileKwargs(), dataclasses.GradScalerKwargs()],
    "twice": lambda: [dataclasses.AutocastKwargs(), dataclasses.AutocastKwargs()],
    "ao": lambda: [dataclasses.AORecipeKwargs()], "msamp": lambda: [dataclasses.MSAMPRecipeKwargs()],
    "two recipes": lambda: [dataclasses.AORecipeKwargs(), dataclasses.MSAMPRecipeKwargs()],
    "texts": lambda: ["nonsense"], "text": lambda: "nonsense", "number": lambda: [1],
    "base": lambda: [dataclasses.KwargsHandler()], "tuple": lambda: (dataclasses.AutocastKwargs(),),
    "class": lambda: [dataclasses.AutocastKwargs], "init": lambda: [dataclasses.InitProcessGroupKwargs()],
    "accumulation": lambda: [dataclasses.GradientAccumulationPlugin(num_steps=2)],
}  # fmt: skip


@probe(*ACCELERATOR, handlers=HANDLED, precision=["no", "bf16", "fp8"])
def handlers(handlers, precision):
    return seen(Accelerator(kwargs_handlers=handlers, mixed_precision=precision))


OBJECTS = {
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
    }, "dynamo_plugin": {"eager": lambda: dataclasses.TorchDynamoPlugin(backend="eager", mode="default")},
}  # fmt: skip
for name_, made_ in OBJECTS.items():
    register(name_, {**made_, "none": lambda: None, "text": lambda: "nonsense", "number": lambda: 1})
for name_, values_ in GIVEN.items():
    register(name_, values_)


@probe("state:PartialState", cpu=SWITCHES, backend=words("gloo nccl GLOO nonsense", None, "", 1))
def partial_backend(cpu, backend):
    state = PartialState(cpu=cpu, backend=backend)
    return [state.backend, state.device, state.distributed_type, state.num_processes]
