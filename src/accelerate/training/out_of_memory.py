"""What a program that runs out of memory says as it ends: what holds the memory of its rank, and what makes it smaller."""

import weakref

from accelerate.diagnostics import memory
from accelerate.precision.master import size
from accelerate.runtime import failure
from accelerate.training.prepared import Facade
from accelerate.utils.memory import should_reduce_batch_size

_LIVE: "weakref.WeakKeyDictionary[Facade, None]" = weakref.WeakKeyDictionary()  # the newest is last
_ADVICE = (
    "What makes it smaller: shards (--use_fsdp --fsdp_version 2, or DeepSpeedPlugin(zero_stage=3)), activation checkpointing\n"
    "(model.gradient_checkpointing_enable(), or torch.utils.checkpoint), half the batch size with twice the\n"
    "gradient_accumulation_steps, mixed_precision='bf16', an 8-bit optimizer, and on a GPU offload to the host.\n"
)
_CACHED = "cache: {} that torch has reserved, and no tensor takes; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes it less.\n"


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
    report = memory.memory_report(models, optimizers, run.device, None, run.process_index)
    cached = _CACHED.format(size(cache)) if (cache := memory.cached(run.device)) else ""
    return f"\n{report}\n{cached}\n{_ADVICE}"
