"""NVIDIA Transformer Engine: layers of its own, and a forward in its fp8 context."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.config.enums import FP8BackendType
from accelerate.config.fp8 import TERecipeKwargs
from accelerate.modules.repoint import followed
from accelerate.precision.base import warn_user
from accelerate.precision.engines.base import Engine, count, new_models
from accelerate.utils import transformer_engine as library
from accelerate.utils.imports import is_transformer_engine_available

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator


class TransformerEngine(Engine):
    """Linear and layer-norm layers become Transformer Engine's, scaled as its ``DelayedScaling`` recipe says."""

    kind = FP8BackendType.TE
    title = "Transformer Engine"
    package = "transformer_engine"
    attribute = "te_recipe_handler"

    def available(self) -> bool:
        """Whether Transformer Engine is installed."""
        return is_transformer_engine_available()

    def recipe(self) -> TERecipeKwargs:
        """Return the recipe of the variables ACCELERATE_FP8_*."""
        return TERecipeKwargs()

    def refusal(self, device: torch.device, recipe: Any | None) -> str | None:
        """Return why Transformer Engine cannot run on a device; Intel's serves its Gaudi."""
        return None if device.type == "hpu" else super().refusal(device, recipe)

    def converted(self, model: nn.Module) -> int:
        """Return how many layers are Transformer Engine's."""
        kinds = library.layer_types()
        return count(model, lambda module: isinstance(module, kinds))

    def convert(self, model: nn.Module, recipe: Any, **options: Any) -> None:
        """Replace linear and layer-norm layers, values kept."""
        library.convert_model(model)

    def forward_context(self, recipe: Any, training: bool = True) -> contextlib.AbstractContextManager:
        """Return Transformer Engine's fp8 context."""
        return library.fp8_context(recipe, training)

    def wrap_forward(self, model: nn.Module, recipe: Any) -> None:
        """Let forward run in the fp8 context."""
        library.apply_fp8_autowrap(model, recipe)


def prepare(accelerator: "Accelerator", objects: Sequence[Any]) -> tuple[Any, ...]:
    """Convert the models among some objects to Transformer Engine, and let their optimizers follow. All ranks.

    Args:
        accelerator: Its ``te_recipe_handler`` or ``fp8_recipe_handler`` says how.
        objects: What the user gave to ``prepare``.

    Returns:
        The same objects, in their order.
    """
    engine = TransformerEngine()
    recipe = accelerator.te_recipe_handler or accelerator.fp8_recipe_handler
    for model in new_models(accelerator, objects):
        if not engine.converted(model):
            with followed(accelerator, model):
                engine.convert(model, recipe)
        if not engine.converted(model):
            warn_user(
                f"mixed_precision='fp8' converted no layer of {type(model).__name__}, which computes in bfloat16 then: no "
                "linear layer has sides that are multiples of 16, and there is no layer norm with weight and bias.",
            )
        elif not library.runs_in_fp8(model):
            engine.wrap_forward(model, recipe)
    return tuple(objects)
