"""Saves and loads that the Trainer does not support: models with parts on each rank, and checkpoints of another strategy.

Models are written into the plan of the save, so each rank writes and hashes its own part. They are read by names, from any
layout that `accelerate.checkpoint.layouts` knows into any other, DeepSpeed's engines included.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from accelerate.checkpoint import layouts, manifest, state
from accelerate.checkpoint.model_io import io_of
from accelerate.checkpoint.read import read_file
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.verify import with_manifest
from accelerate.utils import fsdp_utils


def is_split(trainer: Any) -> bool:
    """Return whether ranks have parts of the model in a way that the Trainer does not know: by tensors, experts, or by FSDP2 before it came."""
    knows = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    return not knows and any(map(state.is_distributed_tensor, trainer.model.parameters()))


def writers(trainer: Any, plan: SavePlan) -> dict[str, Callable[..., None]]:
    """Return the Trainer's methods, by name, that let a plan take what ranks have parts of.

    Collective: call on every rank.
    """
    write = trainer._save_optimizer_and_scheduler
    if trainer.is_fsdp_enabled:  # it calls accelerate's functions, which take a plan for a folder
        return {"_save_optimizer_and_scheduler": lambda folder: write(plan)}
    if trainer.is_deepspeed_enabled or not is_split(trainer):
        return {}

    def save_rest(folder: str) -> None:
        fsdp_utils.save_fsdp_model(None, trainer.accelerator, trainer.model, plan, adapter_only=True)
        fsdp_utils.save_fsdp_optimizer(None, trainer.accelerator, trainer.optimizer, trainer.model, plan)
        if trainer.args.should_save:
            plan.add_object("scheduler.pt", trainer.lr_scheduler.state_dict())

    # The Trainer gathers the weights of a model that arrives sharded; of any other, rank 0 would write its own part.
    methods: dict[str, Callable[..., None]] = {"_save_optimizer_and_scheduler": save_rest}
    if not getattr(trainer, "is_distributed_loading_by_transformers", False):
        whole = trainer.accelerator.get_state_dict
        methods["save_model"] = lambda folder, **rest: trainer._save(folder, state_dict=whole(trainer.model))
    return methods


def readers(trainer: Any, wait: Callable[[Any], Any]) -> dict[str, Callable[..., Any]]:
    """Return replacements of the Trainer's reading methods, by name; the best model is read after a `wait`.

    Collective: call on every rank.
    """
    load_model, load_rest = trainer._load_from_checkpoint, trainer._load_optimizer_and_scheduler
    load_best = trainer._load_best_model

    def model(folder: str, *arguments: Any) -> Any:
        reader = _reader_of(trainer, folder, "model")
        if reader == "accelerate":
            return fsdp_utils.load_fsdp_model(None, trainer.accelerator, trainer.model, folder, adapter_only=True)
        return _convert(trainer.model, folder) if reader == "transformers" else load_model(folder, *arguments)

    def rest(folder: str | None) -> Any:
        if folder is None or _reader_of(trainer, folder, "optimizer") == "trainer":
            return load_rest(folder)
        fsdp_utils.load_fsdp_optimizer(None, trainer.accelerator, trainer.optimizer, trainer.model, folder)
        schedule, groups = read_file(folder, "scheduler.pt", "the scheduler"), len(trainer.optimizer.param_groups)
        # Experts that are spread have separate groups, with the rates of the others.
        for name, values in schedule.items():
            if isinstance(values, list) and all(value == values[0] for value in values):
                schedule[name] = values[:1] * groups
        return trainer.lr_scheduler.load_state_dict(schedule)

    def best() -> Any:
        wait(trainer)
        folder = trainer.state.best_model_checkpoint
        return load_best() if folder is None or _reader_of(trainer, folder, "model") == "trainer" else model(folder)

    return {"_load_from_checkpoint": model, "_load_optimizer_and_scheduler": rest, "_load_best_model": best}


def _reader_of(trainer: Any, folder: str, kind: layouts.Kind) -> str:
    """Return which library reads a model or an optimizer: the "trainer" itself, "accelerate" by names, or "transformers".

    The files of some models, such as those with experts, have other names than the model: transformers converts them, but not
    in its Trainer.
    """
    model, leaves = trainer.model, trainer.is_deepspeed_enabled or not os.path.isdir(folder)
    stored_model = None if leaves else layouts.find(with_manifest(folder), kind)
    if stored_model is not None and stored_model.layout == "zero":
        return "accelerate"
    if stored_model is None or trainer.is_fsdp_enabled:  # which calls accelerate's functions
        return "trainer"
    is_shards = stored_model.name.startswith(layouts.FSDP_MODEL_NAME)
    if kind == "model" and not is_shards and hasattr(model, "from_pretrained"):
        stored = stored_model.open()
        _, missing, strange = layouts.matched(
            model.state_dict(), layouts.model_values(stored), partial(io_of(model).tied_names, model), stored.aliases
        )
        if missing and strange:
            return "transformers"
    stocks = not is_shards if kind == "model" else stored_model.name == manifest.TRAINERS_OPTIMIZER
    return "trainer" if stocks and not is_split(trainer) else "accelerate"


def _convert(model: Any, folder: str) -> None:
    """Let transformers read weights into a model of this kind, split in the same way, and copy them: its Trainer would omit them."""
    kind = next(kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))
    split = {name: value for name in ("distributed_config",) if (value := getattr(model.config, name, None))}
    read, loading_info = kind.from_pretrained(folder, output_loading_info=True, **split)
    values = {name: value for name, value in read.state_dict().items() if name not in loading_info["missing_keys"]}
    model.load_state_dict(values, strict=False)


def engines(trainer: Any) -> dict[str, Callable[..., None]]:
    """Return the functions, by name, with which DeepSpeed's engines read any strategy's checkpoint without running code of a file."""

    def read(engine: Any, folder: str, load_module_strict: bool = True) -> None:
        from accelerate.extensions.deepspeed import checkpoint

        path = with_manifest(folder)
        state.run_on_all_ranks(lambda: checkpoint.read(engine, path, 0, 0, load_module_strict)).apply()

    return {"deepspeed_load_checkpoint": read} if trainer.is_deepspeed_enabled else {}
