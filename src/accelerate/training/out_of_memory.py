"""What a program that runs out of memory says as it ends: what holds the memory of its rank, and the settings that would help most."""

import weakref
from collections.abc import Iterator

import torch

from accelerate.diagnostics import memory
from accelerate.diagnostics.table import table
from accelerate.precision.master import local_part, size
from accelerate.runtime import failure, traits
from accelerate.runtime.torch_private import pytree
from accelerate.training.prepared import Facade
from accelerate.utils.memory import should_reduce_batch_size

_LIVE: "weakref.WeakKeyDictionary[Facade, None]" = weakref.WeakKeyDictionary()  # the newest is last
# Smaller states stay in float32 in 8-bit optimizers.
_SMALL = 4096


# A setting, and the bytes that it saves this rank at most; None where nothing measured that.
Saving = tuple[str, int | None]


def watch(accelerator: Facade) -> None:
    """Explain an error that ends the program, if it means that memory ran out, for as long as the Accelerator lives."""
    _LIVE[accelerator] = None
    failure.watch(explain)


def explain(error: BaseException) -> str:
    """Return what holds this rank's memory, and what would help; an empty text for an error of another kind. Any rank, alone."""
    runs = list(_LIVE)
    if not runs or not isinstance(error, Exception) or not should_reduce_batch_size(error):
        return ""
    run = runs[-1]
    models = [model for each in runs for model in each.prepared.models]
    optimizers = [optimizer for each in runs for optimizer in each.prepared.optimizers]
    activations = max((each._activations_peak for each in runs if each._activations_peak is not None), default=None)
    report = memory.memory_report(models, optimizers, run.device, None, activations, run.process_index)
    states = pytree.tree_leaves([dict(optimizer.state) for optimizer in optimizers])
    large = [local_part(state) for state in states if isinstance(state, torch.Tensor)]
    moments = sum(part.nbytes for part in large if part.dtype is torch.float32 and part.numel() >= _SMALL)
    found = [*_of_states(run, report.rows[0], moments), *_of_activations(run, models, report.rows[0].activations)]
    if cache := memory.cached(run.device):
        found.append(("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: less of torch's cache in pieces", cache))
    found = sorted((one for one in found if one[1] != 0), key=lambda one: one[1] or 0, reverse=True)[:3]
    rows = [(setting, "not measured" if most is None else size(most)) for setting, most in found]
    advice = table(("setting", "saves at most"), rows, ("saves at most",), rule=True)
    cached = f"cache: {size(cache)} that torch has reserved, and no tensor takes.\n" if cache else ""
    return f"\n{report}\n{cached}\nWhat would help most\n{advice}\n"


def _of_states(run: Facade, row: memory.MemoryRow, moments: int) -> Iterator[Saving]:
    """Yield what makes parameters, gradients and optimizer states smaller, and is not set yet."""
    kind, on_host, engine = traits.of(run.distributed_type), run.device.type == "cpu", run.deepspeed_plugin
    held = row.parameters + row.gradients + row.optimizer
    others = 1 - 1 / run.num_processes
    if kind.deepspeed:
        stage = engine.zero_stage
        whole = row.parameters + (row.gradients if stage < 2 else 0) + (row.optimizer if stage < 1 else 0)
        if stage < 3:
            yield "DeepSpeedPlugin(zero_stage=3): shards of all that is whole", int(whole * others)
        if not on_host and not engine.hf_ds_config.is_offload():
            yield "offload_optimizer_device='cpu' of DeepSpeedPlugin", row.optimizer
    elif kind.sharded:
        policy = run.state.fsdp_plugin.cpu_offload
        offloads = getattr(policy, "offload_params", hasattr(policy, "pin_memory"))  # FSDP1's, FSDP2's
        if not on_host and not offloads:
            yield "cpu_offload=True of FullyShardedDataParallelPlugin: shards on the host", held
    elif run.parallelism_config is None and kind.torch_distributed:
        yield "--use_fsdp --fsdp_version 2: shards of parameters, gradients, states", int(held * others)
    if not on_host:
        yield "an 8-bit optimizer, such as AdamW8bit of bitsandbytes or torchao", moments * 3 // 4


def _of_activations(run: Facade, models: list[torch.nn.Module], kept: int | None) -> Iterator[Saving]:
    """Yield what makes activations smaller, and is not set yet."""
    half = None if kept is None else kept // 2
    by_strategy = getattr(getattr(run.state, "fsdp_plugin", None), "activation_checkpointing", False)
    if not by_strategy and not any(
        getattr(part, "gradient_checkpointing", False) for m in models for part in m.modules()
    ):
        yield "activation checkpointing: model.gradient_checkpointing_enable(), or torch.utils.checkpoint", kept
    steps = 2 * run.gradient_accumulation_steps
    yield f"half the batch size, and gradient_accumulation_steps={steps}", half
    if run.mixed_precision == "no":
        yield "mixed_precision='bf16'", half
