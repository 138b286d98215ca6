"""What the Trainer does not save or read by itself: models of which ranks have parts, and checkpoints of another strategy.

They are written into the plan of the save, so each rank writes and hashes its own part, and are read by names: any layout that
`accelerate.checkpoint.layouts` knows, into any other. What DeepSpeed's engines write and read stays theirs.
"""

import itertools
import os
from collections.abc import Callable
from typing import Any

from accelerate.checkpoint import layouts, load, manifest, state
from accelerate.checkpoint.save import SavePlan
from accelerate.utils import fsdp_utils
from accelerate.utils.constants import FSDP_MODEL_NAME

_SCHEDULER = "scheduler.pt"


def is_split(trainer: Any) -> bool:
    """Say whether ranks have parts of the model in a way that the Trainer does not know: by tensors, experts, or by FSDP2 before it came."""
    knows = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    return not knows and any(map(state.is_spread, trainer.model.parameters()))


def writers(trainer: Any, plan: SavePlan) -> dict[str, Callable[..., None]]:
    """Return the Trainer's methods, by name, that let a plan take what ranks have parts of. All ranks call them."""
    write = trainer._save_optimizer_and_scheduler
    if trainer.is_deepspeed_enabled:
        return {"_save_optimizer_and_scheduler": lambda folder: (write(folder), _add_own(trainer, plan))[0]}
    if trainer.is_fsdp_enabled:  # it calls accelerate's functions, which take a plan for a folder
        return {"_save_optimizer_and_scheduler": lambda folder: write(plan)}
    if not is_split(trainer):
        return {}

    def save_rest(folder: str) -> None:
        fsdp_utils.save_fsdp_model(None, trainer.accelerator, trainer.model, plan, adapter_only=True)
        fsdp_utils.save_fsdp_optimizer(None, trainer.accelerator, trainer.optimizer, trainer.model, plan)
        if trainer.args.should_save:
            plan.add_object(_SCHEDULER, trainer.lr_scheduler.state_dict())

    def save_model(folder: str, _internal_call: bool = False) -> None:
        trainer._save(folder, state_dict=trainer.accelerator.get_state_dict(trainer.model))

    # Of a model that arrives split the Trainer gathers the weights; of any other, rank 0 would write its own part.
    arrives = getattr(trainer, "is_distributed_loading_by_transformers", False)
    return {"_save_optimizer_and_scheduler": save_rest} | ({} if arrives else {"save_model": save_model})


def _add_own(trainer: Any, plan: SavePlan) -> None:
    """Let each rank hash what its engine wrote."""
    folder, rank = f"global_step{trainer.model_wrapped.global_steps}", trainer.args.process_index
    for begin, what in itertools.product(("", "bf16_"), ("model", "optim")):
        name = f"{folder}/{begin}zero_pp_rank_{rank}_mp_rank_00_{what}_states.pt"
        if os.path.isfile(os.path.join(plan, name)):
            plan.add_written(name)


def readers(trainer: Any, wait: Callable[[Any], Any]) -> dict[str, Callable[..., Any]]:
    """Return the Trainer's methods, by name, that read what it does not read by itself; the best model after a `wait`. All ranks call them."""
    load_model, load_rest = trainer._load_from_checkpoint, trainer._load_optimizer_and_scheduler
    load_best = trainer._load_best_model

    def model(folder: str, *given: Any) -> None:
        if _is_stocks(trainer, folder, "model"):
            load_model(folder, *given)
        else:
            fsdp_utils.load_fsdp_model(None, trainer.accelerator, trainer.model, folder, adapter_only=True)

    def rest(folder: str | None) -> Any:
        if folder is None or _is_stocks(trainer, folder, "optimizer"):
            return load_rest(folder)
        fsdp_utils.load_fsdp_optimizer(None, trainer.accelerator, trainer.optimizer, trainer.model, folder)
        return trainer.lr_scheduler.load_state_dict(load.read_file(folder, _SCHEDULER, "the scheduler"))

    def best() -> None:
        wait(trainer)
        folder = trainer.state.best_model_checkpoint
        if folder is not None and not _is_stocks(trainer, folder, "model"):
            model(folder)
        else:
            load_best()

    return {"_load_from_checkpoint": model, "_load_optimizer_and_scheduler": rest, "_load_best_model": best}


def _is_stocks(trainer: Any, folder: str, kind: layouts.Kind) -> bool:
    """Say whether the Trainer reads a model or an optimizer by itself; under FSDP it calls accelerate's functions."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or not os.path.isdir(folder):
        return True
    found = layouts.find(load.with_manifest(folder), kind)
    if found is None or is_split(trainer):
        return found is None
    return not found.name.startswith(FSDP_MODEL_NAME) if kind == "model" else found.name == manifest.TRAINERS_OPTIMIZER


def refuse(trainer: Any, folder: str) -> None:
    """Raise ValueError, on all ranks, for a checkpoint with DeepSpeed's files that is resumed without it, or the other way."""
    has_engines = os.path.isfile(os.path.join(folder, "latest"))
    if has_engines != bool(trainer.is_deepspeed_enabled):
        saved, here = ("by", "without") if has_engines else ("without", "with")
        raise ValueError(
            f"{folder!r} was saved {saved} DeepSpeed, and this run trains {here} it: neither reads the other's optimizer. Resume as it was "
            "saved, or begin a new run with its weights."
        )
