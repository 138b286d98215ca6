"""A run that resumes on another number of ranks keeps its global batch: it accumulates more micro-batches, or fewer.

An optimizer step then sees the same samples, so that steps per epoch, schedule and the next sample stay. The number of ranks and the
global batch lie in a small file of the checkpoint, because the Trainer's own state does not have them.
"""

import json
import logging
import os
from typing import Any

logger = logging.getLogger(__name__)

RUN = "accelerate_run.json"


def record(trainer: Any, folder: str) -> None:
    """Write what `keep` reads into a staged folder. One process per folder."""
    values = {"world_size": trainer.args.world_size, "global_batch": _global_batch(trainer)}
    with open(os.path.join(folder, RUN), "w", encoding="utf-8") as file:
        json.dump(values, file)


def keep(trainer: Any, folder: str) -> None:
    """Let the Trainer accumulate so that the global batch is that of the checkpoint, if that was saved on another number of ranks.

    All ranks, before the training.

    Raises:
        ValueError: The ranks do not divide the global batch; it lists the numbers of ranks that do. Or DeepSpeed's engine, whose
            configuration is fixed by then, has another accumulation.
    """
    path, args = os.path.join(folder, RUN), trainer.args
    if not os.path.isfile(path):  # of the stock Trainer
        return
    with open(path, encoding="utf-8") as file:
        former = json.load(file)
    world, batch = former["world_size"], former["global_batch"]
    together = _global_batch(trainer) // args.gradient_accumulation_steps
    if world == args.world_size or batch == together * args.gradient_accumulation_steps:
        return
    what = f"{folder!r} was saved on {world} rank(s) with a global batch of {batch}"
    here = f"here {args.world_size} rank(s) have {together} samples at a time (per_device_train_batch_size={args.per_device_train_batch_size})"
    if batch % together:
        each = max(1, together // args.world_size)
        fit = ", ".join(str(ranks) for ranks in range(1, batch // each + 1) if batch % (each * ranks) == 0)
        raise ValueError(f"{what}; {here}, which does not divide it. Numbers of ranks that do: {fit or 'none'}.")
    steps = batch // together
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ValueError(
            f"{what}; {here}. Pass gradient_accumulation_steps={steps}, so that DeepSpeed's engine keeps it."
        )
    logger.warning("%s; %s: gradient_accumulation_steps is %d now, which keeps it.", what, here, steps)
    args.gradient_accumulation_steps = steps


def _global_batch(trainer: Any) -> int:
    """Return how many samples an optimizer step sees."""
    args = trainer.args
    if hasattr(trainer, "get_total_train_batch_size"):
        return int(trainer.get_total_train_batch_size(args))
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)  # releases before 4.50
