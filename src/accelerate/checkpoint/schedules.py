"""Schedules that are restored on another number of data-parallel replicas than they were saved on."""

import os
import re
from collections.abc import Sequence

from accelerate.checkpoint.state import Common
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.scheduler import AcceleratedScheduler

# Where a rank's file keeps the steps of each scheduler for one optimizer step.
KEY = "schedule_units"


def units(common: Common) -> list[int]:
    """Return what `restore` needs to know of this run's schedules, plain data. Not a collective."""
    return [getattr(scheduler, "advance", 1) for scheduler in common.schedulers]


def restore(common: Common, folder: CheckpointFolder, saved: Sequence[int] | None) -> list[str]:
    """Let restored schedules advance as in the run that saved them; return a line for each whose rate may differ.

    Not a collective.

    Args:
        common: objects that have their states back.
        folder: the checkpoint.
        saved: what `units` returned, None where it was not saved.
    """
    problems = []
    for number, scheduler in enumerate(common.schedulers):
        if isinstance(scheduler, AcceleratedScheduler):
            steps = saved[number] if saved is not None and number < len(saved) else _saved_ranks(folder, scheduler)
            problem = scheduler.continue_from(steps)
            problems += [f"scheduler {number}: {problem}"] if problem else []
    return problems


def _saved_ranks(folder: CheckpointFolder, scheduler: AcceleratedScheduler) -> int | None:
    """Return how often a schedule advanced in a checkpoint without this record: once for each process, as upstream counts."""
    listing = folder.listing
    if scheduler.split_batches or not scheduler.step_with_optimizer or listing.mesh:
        return None
    if listing.files:  # a machine's own folder has the files of its ranks only
        return listing.world_size
    return sum(1 for name in os.listdir(folder) if re.fullmatch(r"random_states_\d+\.pkl", name)) or None
