"""Microsoft's MS-AMP: 8-bit weights, gradients and, at its second level, optimizer state."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.config.enums import FP8BackendType
from accelerate.config.fp8 import MSAMPRecipeKwargs
from accelerate.precision.engines.base import Engine, count, new_models
from accelerate.utils.imports import is_msamp_available

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator


class MSAMP(Engine):
    """``msamp.initialize``, which takes a model and its optimizer together."""

    kind = FP8BackendType.MSAMP
    title = "MS-AMP"
    package = "msamp"
    attribute = "msamp_recipe_handler"

    def available(self) -> bool:
        """Whether MS-AMP is installed."""
        return is_msamp_available()

    def recipe(self) -> MSAMPRecipeKwargs:
        """Return the recipe of ACCELERATE_FP8_OPT_LEVEL."""
        return MSAMPRecipeKwargs()

    def refusal(self, device: torch.device, recipe: Any | None) -> str | None:
        """Return why MS-AMP cannot run on a device: it wants CUDA, and stores in 8 bits on older GPUs as well."""
        return None if device.type == "cuda" else f"MS-AMP does not run on {device.type!r}"

    def converted(self, model: nn.Module) -> int:
        """Return how many layers are MS-AMP's."""
        return count(model, lambda module: any(kind.__name__ == "FP8Linear" for kind in type(module).__mro__))


def prepare(accelerator: "Accelerator", objects: Sequence[Any], device_placement: Any) -> tuple[Any, ...]:
    """Hand a model and its optimizer to MS-AMP, and return what it made of them in their places. All ranks.

    Args:
        accelerator: Its ``msamp_recipe_handler`` or ``fp8_recipe_handler`` says how far to go.
        objects: What the user gave to ``prepare``.
        device_placement: For each object whether it moves to the device, or None for all.

    Returns:
        The objects in their order, model and optimizer replaced.

    Raises:
        ValueError: There is a model to convert without exactly one optimizer, or several models; or a strategy shards the
            model.
    """
    objects = [_standing_for(item) for item in objects]
    places = {index for index, item in enumerate(objects) if isinstance(item, torch.optim.Optimizer)}
    models = list(new_models(accelerator, objects))
    trained = [model for model in models if any(parameter.requires_grad for parameter in model.parameters())]
    if not trained:
        return tuple(objects)
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if str(kind) in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(
            f"fp8 with MS-AMP was asked for beside distributed_type={kind}, but its weights cannot be sharded from outside. Use "
            "AORecipeKwargs (torchao) or TERecipeKwargs (Transformer Engine), or train without sharding."
        )
    if len(trained) != 1 or len(places) != 1:
        raise ValueError(
            f"prepare() got {len(trained)} models to train and {len(places)} optimizers; MS-AMP converts one model and its one "
            "optimizer together. Pass both in one call, one pair to each Accelerator."
        )
    (model,), (place,) = trained, places
    index = next(index for index, item in enumerate(objects) if item is model)
    moves = accelerator.device_placement if device_placement is None else device_placement[index]
    if moves is None or moves:
        model = model.to(accelerator.device)  # it counts on CUDA tensors
    import msamp

    recipe = accelerator.msamp_recipe_handler or accelerator.fp8_recipe_handler
    optimizer = objects[place]
    made_model, made_optimizer = msamp.initialize(model, optimizer, opt_level=recipe.opt_level)
    # A second prepare() of the objects that the user still holds must find what stands for them.
    for given, made in ((objects[index], made_model), (optimizer, made_optimizer)):
        if made is not given:
            given.__dict__["_accelerate_fp8_made"] = made
    objects[index], objects[place] = made_model, made_optimizer
    return tuple(objects)


def _standing_for(item: Any) -> Any:
    return getattr(item, "__dict__", {}).get("_accelerate_fp8_made", item)
