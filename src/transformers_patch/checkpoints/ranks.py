"""A run that resumes on another number of ranks keeps its global batch: it accumulates more micro-batches, or fewer.

An optimizer step then sees the same samples, so that steps per epoch, schedule and the next sample stay the same. The
number of ranks and the global batch are in a small file of the checkpoint, because the Trainer's own state lacks them.
"""

import json
import logging
from pathlib import Path
from typing import Any

from transformers_patch.checkpoints import streams

logger = logging.getLogger(__name__)

RUN = "accelerate_run.json"


def record(trainer: Any, folder: str) -> None:
    """Write what `keep` and `streams` read into a staged folder. One process per folder."""
    values = {"world_size": trainer.args.world_size, "replicas": _replicas(trainer), **_data(trainer)}
    if (passes := vars(trainer).get(streams.STREAM)) is not None:
        values["stream"] = [passes.number, passes.batches * together(trainer)]
    Path(folder, RUN).write_text(json.dumps(values), "utf-8")


def keep(trainer: Any, folder: str) -> dict[str, Any]:
    """Let the Trainer accumulate so that the global batch is that of the checkpoint, if it was saved on another number of ranks.

    Rank 0 warns if other settings that decide the next samples differ.

    Collective: call on every rank, before the training.

    Returns:
        The content that `record` wrote; empty for a folder of the stock Trainer.

    Raises:
        ValueError: The ranks do not divide the global batch; it lists the numbers of ranks that do. Or DeepSpeed's engine, whose
            configuration is fixed by then, has another accumulation.
    """
    if not (file := Path(folder, RUN)).is_file():
        return {}
    former: dict[str, Any] = json.loads(file.read_text("utf-8"))
    parts = "replicas", _replicas(trainer)
    if former.get(*parts) != parts[1] or "replicas" not in former and former["world_size"] != trainer.args.world_size:
        _fit(trainer, folder, former["world_size"], former["global_batch"])
    # The Trainer restores the result of `auto_find_batch_size`.
    former |= {"global_batch": None} if trainer.args.auto_find_batch_size else {}
    comparisons = [(name, former.get(name), value) for name, value in _data(trainer).items()]
    changed = "; ".join(f"{name} was {old}, and is {new}" for name, old, new in comparisons if old not in (None, new))
    if changed and trainer.args.process_index == 0:
        logger.warning("%r resumes with other samples than the run that saved it: %s.", folder, changed)
    return former


def _data(trainer: Any) -> dict[str, Any]:
    """Return what decides which samples a step sees."""
    args, data = trainer.args, getattr(trainer, "train_dataset", None)
    seed = args.seed if args.data_seed is None else args.data_seed
    samples = len(data) if hasattr(data, "__len__") else None
    return {"global_batch": _global_batch(trainer), "seed": seed, "dataset_length": samples}


def together(trainer: Any) -> int:
    """Return how many samples the ranks have at a time."""
    return _global_batch(trainer) // int(trainer.args.gradient_accumulation_steps)


def _replicas(trainer: Any) -> int:
    """Return how many parts of a batch are computed at a time: ranks that share a model or a sequence have the same part."""
    return together(trainer) // int(getattr(trainer, "_train_batch_size", None) or trainer.args.train_batch_size)


def _fit(trainer: Any, folder: str, world: int, batch: int) -> None:
    args, at_once = trainer.args, together(trainer)
    if batch == at_once * args.gradient_accumulation_steps:
        return
    what = f"{folder!r} was saved on {world} rank(s) with a global batch of {batch}"
    current_text = f"here {args.world_size} rank(s) have {at_once} samples at a time (per_device_train_batch_size={args.per_device_train_batch_size})"
    if batch % at_once:
        rank_batch = max(1, at_once // args.world_size)
        fit = ", ".join(str(ranks) for ranks in range(1, batch // rank_batch + 1) if batch % (rank_batch * ranks) == 0)
        raise ValueError(
            f"{what}; {current_text}, which does not divide it. Numbers of ranks that do: {fit or 'none'}."
        )
    steps = batch // at_once
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ValueError(
            f"{what}; {current_text}. Pass gradient_accumulation_steps={steps}, so DeepSpeed's engine keeps it."
        )
    logger.warning("%s; %s: gradient_accumulation_steps is %d now, which keeps it.", what, current_text, steps)
    args.gradient_accumulation_steps = steps


def _global_batch(trainer: Any) -> int:
    """Return how many samples an optimizer step sees."""
    args = trainer.args
    if hasattr(trainer, "get_total_train_batch_size"):
        return int(trainer.get_total_train_batch_size(args))
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)  # releases before 4.50
