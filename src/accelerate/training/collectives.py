"""Gathering for metrics: every sample once, whatever filled up the last batch."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from accelerate.training.prepared import Facade
from accelerate.utils import operations

logger = logging.getLogger(__name__)


def gather_for_metrics(accelerator: Facade, data: Any, use_gather_object: bool) -> Any:
    """Gather predictions or labels, and drop the samples that only filled up the last batch."""
    by_tensor = not use_gather_object
    try:
        operations.recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        by_tensor = False
    gather = operations.gather_with if by_tensor else operations.gather_object_with
    gathered = gather(accelerator._communicator, data)
    state = accelerator.gradient_state
    layout = accelerator.parallelism_config
    # A stream that several worker processes share out may have a completed round before the last one.
    counts = getattr(state.active_dataloader, "batch_counts", None)
    whole = counts is None and (not state.end_of_dataloader or state.remainder == 0)
    keep = state.remainder if counts is None else sum(counts)
    spread = layout is not None and layout.non_data_parallel_size > 1 and accelerator.torch_device_mesh is not None
    # A sampler of the user's own fills up each part at its own end, and a reader of a node the parts of its node.
    plan = getattr(state.active_dataloader, "plan", None)
    apart = counts is not None and bool(getattr(plan, "filled_ends", None) or getattr(plan, "readers", None))
    if spread or apart:
        inner, copies = (layout.non_data_parallel_size, layout.tp_size) if spread else (1, 1)
        limit = counts if apart else None if whole or keep < 0 else keep
        pick = partial(_of_distinct, inner=inner, copies=copies, ranks=accelerator.num_processes, keep=limit)
        return operations.recursively_apply(pick, gathered) if by_tensor else pick(gathered)
    if whole:
        return gathered
    if keep < 0:
        logger.info("The dataset has no length: gather_for_metrics returns all gathered samples, duplicates included.")
        return gathered
    return _first(gathered, keep, by_tensor)


def _of_distinct(gathered: Any, *, inner: int, copies: int, ranks: int, keep: int | tuple[int, ...] | None) -> Any:
    """Return what ranks gathered, once from the `copies` that share each layer of a replica of `inner` ranks.

    Of all replicas the first `keep` samples stay, or so many of each as a tuple says.

    Ranks that have parts of one sequence may differ in what they computed, so all of theirs stay.
    """
    whole = isinstance(gathered, torch.Tensor) and gathered.ndim == 0
    if whole or not isinstance(gathered, (torch.Tensor, list)) or len(gathered) % ranks:
        return gathered
    each = len(gathered) // ranks
    chosen = [
        rank * each + sample
        for rank in range(0, ranks, copies)
        for sample in range(each)
        if keep is None or sample < (keep[rank // inner] if isinstance(keep, tuple) else keep - rank // inner * each)
    ]
    return gathered[chosen] if isinstance(gathered, torch.Tensor) else [gathered[index] for index in chosen]


def _first(gathered: Any, keep: int, by_tensor: bool) -> Any:
    """Return the first samples of what was gathered; on one process too, where a caller may have filled it up himself."""
    if by_tensor:
        return operations.recursively_apply(lambda tensor: tensor[:keep] if tensor.ndim else tensor, gathered)
    # One process gets its own object back, which may be anything: a number or a dict has no first samples.
    has_samples = isinstance(gathered, Sequence) or (isinstance(gathered, torch.Tensor) and gathered.ndim > 0)
    return gathered[:keep] if has_samples else gathered
