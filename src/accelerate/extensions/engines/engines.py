"""Preparing for an engine that owns the whole step: a model, its optimizer and its scheduler become one."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from accelerate.training.prepare import chain, find_prepared, kind_of, own_states, register
from accelerate.training.run import TrainingRun


def prepare(
    accelerator: TrainingRun, objects: Sequence[Any], name: str, kind: Callable[[Any], str | None] = kind_of
) -> tuple[list[Any], Any, bool]:
    """Prepare loaders, and then a new model with its optimizer and scheduler as one engine.

    Collective: call on every rank.

    Args:
        objects: What `Accelerator.prepare` was given.
        name: The engine's name for messages.
        kind: Returns which kind of preparable object one is.

    Returns:
        The prepared objects in order; the new engine, or None if nothing was new; whether it trains.

    Raises:
        AssertionError: There are two new models, optimizers or schedulers.
        ValueError: An optimizer or a scheduler comes without its model.
    """
    made, new = _sorted(accelerator, objects, name, kind)
    if not new:
        return made, None, False
    model = objects[new["model"]]
    optimizer, scheduler = (objects[new[part]] if part in new else None for part in ("optimizer", "scheduler"))
    loaders = [item for item in made if isinstance(item, DataLoader)] or accelerator._dataloaders
    inside = [model, *chain(model)]
    with own_states(accelerator):
        strategy: Any = accelerator._strategy  # that of an engine
        engine, wrapped, stepped = strategy.engine(accelerator, model, optimizer, scheduler, loaders)
    made[new["model"]] = register(accelerator, "model", engine, *chain(engine), *inside)
    if wrapped is not None:
        made[new["optimizer"]] = register(accelerator, "optimizer", wrapped, wrapped.optimizer, optimizer)
    if scheduler is not None and (stepped is None or stepped is scheduler):  # which no engine steps
        made[new["scheduler"]] = accelerator._prepare_one(scheduler)
    elif scheduler is not None:
        made[new["scheduler"]] = register(accelerator, "scheduler", stepped, stepped.scheduler, scheduler)
    return made, engine, wrapped is not None


def _sorted(
    accelerator: TrainingRun, objects: Sequence[Any], name: str, kind_of: Callable[[Any], str | None]
) -> tuple[list[Any], dict[str, int]]:
    """Prepare loaders and what was prepared before; return all in order, and where a new model, optimizer and scheduler are."""
    made = list(objects)
    new: dict[str, int] = {}
    for position, item in enumerate(objects):
        kind = kind_of(item)
        if kind == "loader":
            made[position] = accelerator._prepare_one(item, first_pass=True)
        elif kind is not None and (known := find_prepared(accelerator, item)) is not None:
            made[position] = known
        elif kind in new:
            raise AssertionError(
                f"prepare() got two new {kind}s: {type(objects[new[kind]]).__name__} and {type(item).__name__}. {name} makes one engine "
                "of a model, its optimizer and its scheduler: call prepare once for each model."
            )
        elif kind is not None:
            new[kind] = position
    if new and "model" not in new:
        raise ValueError(
            f"prepare() got a new {next(iter(new))} without its model. {name} makes one engine of them: pass the model, its "
            "optimizer and its scheduler in one call."
        )
    return made, new
