"""Metrics of a run: gathered, every sample once, whatever filled up the last batch."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from accelerate.base.nested import honor_type, like_mapping, recursively_apply
from accelerate.comm import operations
from accelerate.training.run import TrainingRun

logger = logging.getLogger(__name__)


def gather_for_metrics(accelerator: TrainingRun, data: Any, use_gather_object: bool) -> Any:
    """Gather predictions or labels, and drop the samples that only filled up the last batch."""
    by_tensor = not use_gather_object
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        by_tensor = False
    state = accelerator.gradient_state
    layout = accelerator.parallelism_config
    # A stream that several worker processes share out may have a completed round before the last one.
    counts = getattr(state.active_dataloader, "batch_counts", None)
    filled = state.end_of_dataloader and state.remainder != 0
    whole = counts is None and not (filled and getattr(state.active_dataloader, "_may_fill_uncounted", True))
    keep = state.remainder if counts is None else sum(counts)
    # The ranks of a replica, those that share each layer, and the stages of a pipeline.
    inner, copies, stages = 1, 1, 1
    if layout is not None and layout.non_data_parallel_size > 1 and accelerator.torch_device_mesh is not None:
        copies, stages = layout.tp_size, layout.pp_size  # type: ignore[assignment]  # no size is None
        inner = layout.non_data_parallel_size // stages
    communicator, ranks = accelerator._communicator, accelerator.num_processes
    if by_tensor:
        gathered = operations.gather_with(communicator, data)
    else:  # chosen before lists of different lengths are joined
        distinct = slice(0, ranks // stages, copies)
        gathered = operations.gather_object_with(communicator, data, distinct)
        inner, copies, stages, ranks = inner // copies, 1, 1, len(range(ranks)[distinct])
    # A sampler of the user's own fills up each part at its own end.
    reading = getattr(state.active_dataloader, "_reading", None)
    has_filled_ends = counts is not None and bool(getattr(reading, "filled_ends", None))
    if inner * stages > 1 or has_filled_ends:
        limit = counts if has_filled_ends else None if whole or keep < 0 else keep
        pick = partial(_of_distinct, inner=inner, copies=copies, stages=stages, ranks=ranks, keep=limit)
        return recursively_apply(pick, gathered) if by_tensor else _over_columns(pick, gathered)
    if whole:
        return gathered
    if keep < 0:
        logger.info("The dataset has no length: gather_for_metrics returns all gathered samples, duplicates included.")
        return gathered
    return _first(gathered, keep, by_tensor)


def _of_distinct(
    gathered: Any, *, inner: int, copies: int, stages: int, ranks: int, keep: int | tuple[int, ...] | None
) -> Any:
    """Return what ranks gathered, once from the `copies` that share each layer of a replica of `inner` ranks.

    Pipelines of several `stages` lie outermost, so the first of their ranks count. Of all replicas the first `keep` samples stay, or so many of each as a tuple says.

    Ranks that have parts of one sequence may differ in what they computed, so all of theirs stay.
    """
    whole = isinstance(gathered, torch.Tensor) and gathered.ndim == 0
    if whole or not isinstance(gathered, (torch.Tensor, list)) or len(gathered) % ranks:
        return gathered
    each = len(gathered) // ranks
    chosen = [
        rank * each + sample
        for rank in range(0, ranks // stages, copies)
        for sample in range(each)
        if keep is None or sample < (keep[rank // inner] if isinstance(keep, tuple) else keep - rank // inner * each)
    ]
    return gathered[chosen] if isinstance(gathered, torch.Tensor) else [gathered[index] for index in chosen]


def _first(gathered: Any, keep: int, by_tensor: bool) -> Any:
    """Return the first samples of what was gathered; on one process too, where a caller may have filled it up himself."""
    if by_tensor:
        return recursively_apply(lambda tensor: tensor[:keep] if tensor.ndim else tensor, gathered)
    return _over_columns(lambda column: column[:keep] if _has_samples(column) else column, gathered)


def _has_samples(column: Any) -> bool:
    # One process gets its own object back, which may be anything: a number or a string has no first samples.
    if isinstance(column, (torch.Tensor, np.ndarray)):
        return column.ndim > 0
    return isinstance(column, Sequence) and not isinstance(column, (str, bytes))


def _over_columns(function: Any, gathered: Any, inside: bool = False) -> Any:
    """Apply a function to each column of a structure that `gather_object` has gathered, but not to single values of ranks."""
    if operations.holds_columns(gathered):
        items = gathered.items() if isinstance(gathered, Mapping) else enumerate(gathered)
        results = {key: _over_columns(function, item, True) for key, item in items}
        return (
            like_mapping(gathered, results)
            if isinstance(gathered, Mapping)
            else honor_type(gathered, results.values())
        )
    return gathered if inside and isinstance(gathered, tuple) else function(gathered)
