"""Preparing for an engine that owns the whole step: a model, its optimizer and its scheduler become one."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from accelerate.data.loader import PreparedLoader
from accelerate.strategies.deepspeed.engine import is_schedule
from accelerate.strategies.deepspeed.wrappers import DeepSpeedEngineWrapper
from accelerate.training.prepare import chain, find_prepared, kind_of, own_states, register
from accelerate.training.run import TrainingRun


def prepare(accelerator: TrainingRun, objects: Sequence[Any]) -> tuple[Any, ...]:
    """Prepare loaders, and then a new model with its optimizer and scheduler as one engine. All ranks.

    Raises:
        AssertionError: There are two new models, optimizers or schedulers.
        ValueError: An optimizer or a scheduler comes without its model, or a setting does not fit the engine.
    """
    layout = accelerator.parallelism_config
    shares = layout is not None and layout._sp_by_deepspeed
    possible = ("dp_replicate", "sp") if shares else ("dp_replicate",)
    others = [name for name in (layout.active_mesh_dims if layout is not None else ()) if name not in possible]
    if others:
        sizes = ", ".join(f"{name}_size={getattr(layout, f'{name}_size')}" for name in others)
        raise NotImplementedError(
            f"{sizes} of parallelism_config with DeepSpeed, whose ZeRO stages shard over all processes. Set it to 1; sequences are shared with "
            "sp_size and sp_backend='deepspeed'. With FSDP each size is possible, and sp_backend='torch'."
        )
    if accelerator._exact_accumulation:
        raise ValueError(
            "GradientAccumulationPlugin(exact=True) is not possible with DeepSpeed, whose engine divides each loss by "
            "gradient_accumulation_steps. Leave exact away."
        )
    made, engine, trains = _built(accelerator, objects, "DeepSpeed")
    if engine is None:
        return tuple(made)
    accelerator.deepspeed_config = accelerator.deepspeed_plugin.deepspeed_config
    wrapped, trained = DeepSpeedEngineWrapper(engine), accelerator.prepared.engines
    if trains:
        trained.append(wrapped)
    accelerator.deepspeed_engine_wrapped = (trained or [wrapped])[0]
    if shares:
        for position, item in enumerate(objects):
            if kind_of(item) == "loader":
                made[position] = accelerator.deepspeed_ulysses_dl_adapter(made[position], engine)
    return tuple(made)


def prepare_megatron(accelerator: TrainingRun, objects: Sequence[Any]) -> tuple[Any, ...]:
    """Prepare loaders, and then a new model with its optimizer and scheduler as one engine of Megatron core. All ranks.

    Raises:
        AssertionError: There are two new models, optimizers or schedulers.
        ValueError: An optimizer or a scheduler comes without its model.
    """
    return tuple(_built(accelerator, objects, "Megatron-LM")[0])


def _built(accelerator: TrainingRun, objects: Sequence[Any], kind: str) -> tuple[list[Any], Any, bool]:
    """Return the prepared objects in order, the new engine, None where nothing was new, and whether it trains."""
    made, new = _sorted(accelerator, objects, kind)
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


def _sorted(accelerator: TrainingRun, objects: Sequence[Any], engine: str) -> tuple[list[Any], dict[str, int]]:
    """Prepare loaders and what was prepared before; return all in order, and where a new model, optimizer and scheduler are."""
    made = list(objects)
    new: dict[str, int] = {}
    for position, item in enumerate(objects):
        kind = "scheduler" if is_schedule(item) else kind_of(item)
        if kind == "loader":
            made[position] = accelerator._prepare_one(item, first_pass=True)
        elif kind is not None and (known := find_prepared(accelerator, item, kind)) is not None:
            made[position] = known
        elif kind in new:
            raise AssertionError(
                f"prepare() got two new {kind}s: {type(objects[new[kind]]).__name__} and {type(item).__name__}. {engine} makes one engine "
                "of a model, its optimizer and its scheduler: call prepare once for each model."
            )
        elif kind is not None:
            new[kind] = position
    if new and "model" not in new:
        raise ValueError(
            f"prepare() got a new {next(iter(new))} without its model. {engine} makes one engine of them: pass the model, its "
            "optimizer and its scheduler in one call."
        )
    return made, new


def share_loader(accelerator: TrainingRun, loader: Any) -> Any:
    """Return what hands out parts of a loader's batches to the ranks that share a sequence.

    Raises:
        ValueError: DeepSpeed shares no sequences here, or no engine was made yet.
    """
    layout = accelerator.parallelism_config
    if layout is None or not layout._sp_by_deepspeed or accelerator.deepspeed_engine_wrapped is None:
        raise ValueError(
            "deepspeed_ulysses_dl_adapter belongs to an engine that shares sequences. Pass deepspeed_plugin=DeepSpeedPlugin(...) and "
            "ParallelismConfig(sp_size=..., sp_backend='deepspeed') to the Accelerator, and prepare the model first."
        )
    from accelerate.strategies.deepspeed import ulysses

    if not isinstance(loader, PreparedLoader):
        loader = accelerator.prepare_data_loader(loader)
    return ulysses.adapter(accelerator, loader)
