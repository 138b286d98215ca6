"""Preparing for DeepSpeed's engine, and loaders of the ranks that share a sequence."""

from typing import Any

from torch import nn

from accelerate.data.loader import PreparedLoader
from accelerate.extensions.deepspeed import ulysses
from accelerate.extensions.deepspeed.wrappers import DeepSpeedEngineWrapper
from accelerate.extensions.engines import engines
from accelerate.training import prepare as preparation
from accelerate.training.run import TrainingRun


def is_schedule(scheduler: Any) -> bool:
    """Whether this is one of DeepSpeed's schedulers, which derive from none of torch's."""
    return any(kind.__module__ == "deepspeed.runtime.lr_schedules" for kind in type(scheduler).__mro__)


def kind_of(obj: Any) -> str | None:
    """Return which kind of preparable object this is, DeepSpeed's schedulers included."""
    return "scheduler" if is_schedule(obj) else preparation.kind_of(obj)


def _prepare_deepspeed(accelerator: TrainingRun, *objects: Any) -> tuple[Any, ...]:
    """Prepare loaders, and then a new model with its optimizer and scheduler as one engine.

    Collective: call on every rank.

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
            "gradient_accumulation_steps. Remove exact."
        )
    results, engine, trains = engines.prepare(accelerator, objects, "DeepSpeed", kind_of)
    if engine is None:
        return tuple(results)
    accelerator.deepspeed_config = accelerator.deepspeed_plugin.deepspeed_config
    wrapped, trained = DeepSpeedEngineWrapper(engine), accelerator.prepared.engines
    if trains:
        trained.append(wrapped)
    accelerator.deepspeed_engine_wrapped = (trained or [wrapped])[0]
    if shares:
        for position, item in enumerate(objects):
            if kind_of(item) == "loader":
                results[position] = accelerator.deepspeed_ulysses_dl_adapter(results[position], engine)
    return tuple(results)


def deepspeed_ulysses_dl_adapter(accelerator: Any, dl: Any, model: nn.Module) -> Any:
    """Adapt a loader to DeepSpeed's sequence parallelism, as ``prepare`` does for those that come with their model.

    Collective: call on every rank.

    Args:
        dl: A prepared loader; another one is prepared first. Its batches are dicts with "input_ids" and "position_ids".
        model: The prepared model that trains on it.

    Returns:
        An iterable of parts of batches, as long as the loader times ``sp_size``.

    Raises:
        ValueError: DeepSpeed shares no sequences in this run, or no model was prepared yet.
    """
    layout = accelerator.parallelism_config
    if layout is None or not layout._sp_by_deepspeed or accelerator.deepspeed_engine_wrapped is None:
        raise ValueError(
            "deepspeed_ulysses_dl_adapter belongs to an engine that shares sequences. Pass deepspeed_plugin=DeepSpeedPlugin(...) and "
            "ParallelismConfig(sp_size=..., sp_backend='deepspeed') to the Accelerator, and prepare the model first."
        )
    if not isinstance(dl, PreparedLoader):
        dl = accelerator.prepare_data_loader(dl)
    return ulysses.adapter(accelerator, dl)
