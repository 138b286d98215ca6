"""Schedules that are restored on another number of data-parallel replicas than they were saved on."""

import os
import re
from collections.abc import Sequence
from fractions import Fraction

from accelerate.checkpoint.state import Common
from accelerate.data.loader import PreparedLoader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState

# Where a rank's file keeps, for each scheduler, the steps for one optimizer step (a fraction) and the samples in one, or 0.
KEY = "schedule_units"


def units(common: Common) -> list[list[int]]:
    """Return what `restore` needs to know of this run's schedules, plain data. Any rank, alone."""
    samples = _samples_per_update(common)
    steps = [Fraction(getattr(obj, "advance", 1)) for obj in common.schedulers]
    return [[step.numerator, step.denominator, samples] for step in steps]


def restore(common: Common, folder: str, saved: Sequence[Sequence[int]] | None) -> list[str]:
    """Let restored schedules advance as in the run that saved them; return a line for each whose rate may differ. Any rank, alone.

    Args:
        common: objects that have their states back.
        folder: the checkpoint.
        saved: what `units` returned, None where it was not saved.
    """
    samples, problems = _samples_per_update(common), []
    for number, scheduler in enumerate(common.schedulers):
        if not isinstance(scheduler, AcceleratedScheduler):
            continue
        if saved is not None and number < len(saved):
            steps, former = Fraction(*saved[number][:2]), saved[number][2]
        else:
            steps, former = _saved_ranks(folder, scheduler), 0
        ratio = Fraction(samples, former) if samples and former else Fraction(1)
        problem = scheduler.continue_from(steps, ratio)
        problems += [f"scheduler {number}: {problem}"] if problem else []
    return problems


def _samples_per_update(common: Common) -> int:
    """Return how many samples an optimizer step takes by the first prepared loader, 0 where that is not known."""
    loader = next((loader for loader in common.loaders() if isinstance(loader, PreparedLoader)), None)
    try:
        return 0 if loader is None else loader.total_batch_size * GradientState().num_steps
    except TypeError:  # batches of no fixed size
        return 0


def _saved_ranks(folder: str, scheduler: AcceleratedScheduler) -> Fraction:
    """Return how often a schedule advanced in a checkpoint without this record: once for each process, as upstream counts."""
    listing = getattr(folder, "listing", None)
    own = Fraction(scheduler.steps_per_update)
    if scheduler.split_batches or (listing is not None and listing.mesh):
        return own
    if listing is not None and listing.files:  # a machine's own folder has the files of its ranks only
        ranks = listing.world_size
    else:
        ranks = sum(1 for name in os.listdir(folder) if re.fullmatch(r"random_states_\d+\.pkl", name))
    return Fraction(ranks) if ranks else own
