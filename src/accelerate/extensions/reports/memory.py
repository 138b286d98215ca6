"""The memory report: parameters, gradients, optimizer state and the peak of activations of each rank; shown, too, as memory runs out."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.base.table import Report
from accelerate.extensions.reports.estimator import Layout, resting
from accelerate.extensions.reports.footprint import pieces, tensors_here, zero_stage
from accelerate.extensions.reports.inventory import inventory_of_model
from accelerate.modules.unwrap import id_tensor_storage
from accelerate.precision.master import size
from accelerate.runtime.run import Run
from accelerate.runtime.torch_private import local_part, pytree

_ENGINE = "optimizer: with DeepSpeed its copies of the weights, too. Its buffers of communication are in no column."
_COLUMNS = ("rank", "parameters", "buffers", "gradients", "optimizer", "activations", "peak")
_ADVICE = (
    "To reduce it, use shards (--use_fsdp --fsdp_version 2, or DeepSpeedPlugin(zero_stage=3)), activation checkpointing\n"
    "(model.gradient_checkpointing_enable(), or torch.utils.checkpoint), half the batch size with twice the\n"
    "gradient_accumulation_steps, mixed_precision='bf16', an 8-bit optimizer, and on a GPU offload to the host.\n"
)
_CACHED = "cache: {} that torch has reserved, and no tensor takes; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes it less.\n"


@dataclass(frozen=True)
class MemoryRow:
    """The memory of one rank, in bytes; memory that several tensors share counts once.

    Attributes:
        gradients: with unsharded ones that wait for an exchange.
        activations: the part of the peak that is in no other column; None if the device does not count its allocations.
        peak: the peak of the device's allocations, or of the process's resident memory on a CPU.
    """

    rank: int
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int | None
    peak: int

    def cells(self) -> list[str]:
        """Return the row as text."""
        _, *numbers = vars(self).values()
        return [str(self.rank), *("not measured" if number is None else size(number) for number in numbers)]


def memory_report(
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    device: torch.device,
    gather: Callable[[torch.Tensor], torch.Tensor] | None,
    rank: int = 0,
) -> Report:
    """Return each rank's memory, the same report on every rank; call it after a first backward pass.

    Without a `gather`, the report has only this rank, under this number, and needs no memory of the device.

    Collective: call on every rank.
    """
    counted: dict[Any, None] = {}
    states = pytree.tree_leaves([dict(optimizer.state) for optimizer in optimizers])
    states = [value for value in states if isinstance(value, torch.Tensor)]
    notes = [_ENGINE] if any(zero_stage(model) is not None for model in models) else []
    groups = [*map(tensors_here, models), {"optimizer": states}]
    sizes = [_count((t for kinds in groups for t in kinds.get(kind, ())), counted) for kind in _COLUMNS[1:5]]
    allocated = getattr(getattr(torch, device.type, None), "max_memory_allocated", None)
    if device.type == "cpu" or allocated is None:
        peak = _resident_peak()
        note = "peak: most memory that the process had resident since its start, libraries included."
        rest, kind = -1, f"not measured on {device.type!r}"
    else:
        peak = allocated(device)
        note = f"peak: most that torch had allocated since the start or torch.{device.type}.reset_peak_memory_stats()."
        rest = max(0, peak - sum(key[2] for key in counted if key[0].type == device.type))
        kind = "the part of the peak that is in no other column, buffers of communication included"
    lines = [[*sizes, rest, peak]]
    if gather is not None:
        rank, lines = 0, gather(torch.tensor(lines, dtype=torch.int64, device=device)).tolist()
    rows = [
        MemoryRow(number, *line[:4], activations=line[4] if line[4] >= 0 else None, peak=line[5])
        for number, line in enumerate(lines, rank)
    ]
    return Report(f"Memory on {device.type}", _COLUMNS, tuple(rows), (f"activations: {kind}.", note, *notes))


def _count(tensors: Iterable[torch.Tensor], counted: dict[Any, None]) -> int:
    """Return the bytes of the memory under some tensors that was not counted before, and count it."""
    total = 0
    for tensor in tensors:
        local = local_part(tensor)
        key = id_tensor_storage(local)
        if key not in counted and not local.is_meta:
            counted[key] = None
            total += key[2]
    return total


def cached(device: torch.device) -> int:
    """Return the bytes that torch has reserved on a device and that no tensor takes."""
    module = getattr(torch, device.type, None)
    if not hasattr(module, "memory_reserved"):
        return 0
    return module.memory_reserved(device) - module.memory_allocated(device)


def _resident_peak() -> int:
    try:
        import resource
    except ImportError:  # Windows has no such count
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def explain(runs: Sequence[Run]) -> str:
    """Return what holds the memory of this rank's runs, and what would help. Not a collective."""
    run = runs[-1]
    models = [model for former_run in runs for model in former_run._models]
    optimizers = [optimizer for former_run in runs for optimizer in former_run._optimizers]
    report = memory_report(models, optimizers, run.device, None, run.process_index)
    kept = _CACHED.format(size(cache)) if (cache := cached(run.device)) else ""
    return f"\n{report}\n{kept}\n{_ADVICE}{_with_shards(run, models)}"


def _with_shards(run: Run, models: Sequence[nn.Module]) -> str:
    """Return this rank's need if FSDP2 sharded its models over all ranks; an empty text if they are sharded, or with one rank."""
    ranks = run.num_processes
    if ranks == 1 or any(piece.strategy for model in models for piece in pieces(model)):
        return ""
    inventories = [inventory_of_model(model, "") for model in models]
    replicated, then = (
        sum(
            rest.parameters + rest.gradients + rest.optimizer
            for rest in (resting(inventory, layout) for inventory in inventories)
        )
        for layout in (Layout(dp_replicate=ranks), Layout(dp_shard=ranks, fsdp=True))
    )
    return f"Parameters, gradients and Adam's moments take {size(replicated)} on each rank; sharded over these {ranks} ranks, {size(then)}.\n"
