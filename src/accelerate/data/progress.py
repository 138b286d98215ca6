"""Records of where a loader is in its epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Position:
    """A position within an epoch, which was loaded and which the next iteration may continue at.

    Attributes:
        record: what `resume.capture` returned.
        batches: steps behind it, as the loader counts them now.
        extra_samples: samples of all processes behind it, beyond these steps.
        resume_without_skip: a plain loop continues there; else only one that skips as many batches.
        loader_state: state of torchdata's loader that was loaded with it.
        loader_continues: torchdata's loader continues from that state.
    """

    record: dict[str, Any]
    batches: int
    extra_samples: int = 0
    resume_without_skip: bool = True
    loader_state: dict[str, Any] | None = None
    loader_continues: bool = False


class EpochStart(NamedTuple):
    """What an epoch began with: the states that its order was drawn from, and samples that an earlier run had read of it."""

    generators: dict[str, Any] | None
    order_generator: torch.Tensor | None
    extra_samples: int


class BeforeRead(NamedTuple):
    """States from before the reads of a step, which a run that continues there repeats; None where it need not."""

    generators: dict[str, Any] | None
    dataset: Any
    loader: dict[str, Any] | None


@dataclass
class Progress:
    """Where a loader is. The views that `skip_first_batches` makes share it.

    Attributes:
        batches: batches of the epoch that were yielded, skipped ones included.
        at_end: the one yielded last is the last of the epoch.
        running: a loop is open.
        micro_batches: how many micro-batches each batch is yielded in; more than 1 if ranks share sequences.
        micro_batch: how many micro-batches of the present batch were yielded; 0 when all were.
        micro_batch_loops: loops over micro-batches that have begun. A loop that was left resets nothing once another one runs.
        pending: a loaded position that waits for the next iteration.
        finished: batches of the epoch that was over when the loaded checkpoint was saved.
        start: what the running epoch began with.
        before_read: states by the step that was read with them, of steps that were read ahead; None if this process reads nothing.
        workers_kept: persistent workers were started, which draws a seed once for all epochs.
        worker_seed: the seed of the datasets in workers.
    """

    epoch: int = 0
    batches: int = 0
    at_end: bool = False
    running: bool = False
    micro_batches: int = 1
    micro_batch: int = 0
    micro_batch_loops: int = 0
    pending: Position | None = None
    finished: int = 0
    start: EpochStart | None = None
    before_read: dict[int, BeforeRead] | None = None
    workers_kept: bool = False
    worker_seed: int | None = None

    @property
    def pending_in_epoch(self) -> bool:
        """Whether a loaded position waits that is in the present epoch; `set_epoch` may have chosen another one."""
        return self.pending is not None and self.pending.record["epoch"] == self.epoch
