"""Where a loader stands: the record that its iterations, its views and its checkpoints share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Pending:
    """A position within an epoch that was loaded and waits for the next iteration; an empty one has only its order drawn again."""

    position: dict[str, Any]
    batches: int
    extra_samples: int = 0
    resume_without_skip: bool = True
    # The state of torchdata's loader that was loaded with the position, and whether that loader continues from it.
    loader_state: dict[str, Any] | None = None
    loader_continues: bool = False


@dataclass(frozen=True)
class Noted:
    """State from before the reads of a step, for a run that goes on there; None where it is not needed."""

    random: dict[str, Any] | None = None
    dataset: Any = None
    loader: dict[str, Any] | None = None


@dataclass
class Progress:
    """Where a loader stands. The views that `skip_first_batches` makes share it with their origin."""

    epoch: int = 0
    batches: int = 0
    # Micro-batches that each batch is handed out in, and how many of the present one were; 0 when all were.
    parts: int = 1
    part: int = 0
    loops_in_parts: int = 0
    extra_samples: int = 0
    running: bool = False
    pending: Pending | None = None
    finished: int = 0
    at_end: bool = False
    generator_state: torch.Tensor | None = None
    at_start: dict[str, Any] | None = None
    noted: dict[int, Noted] | None = None
    workers_kept: bool = False
    worker_seed: int | None = None
