"""torchao's float8: linear layers whose matrix products run on 8-bit operands, scaled for each tensor."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.config.enums import FP8BackendType
from accelerate.config.fp8 import AORecipeKwargs
from accelerate.modules.repoint import followed
from accelerate.precision.base import warn_user
from accelerate.precision.engines.base import Engine, count, new_models
from accelerate.runtime import storage
from accelerate.utils.imports import is_torchao_available

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

_EMULATED = (
    "fp8 on {device} is emulated: matrix products see the values that 8 bits can hold, and are computed in higher precision. "
    "Use it to try the numerics; it saves neither time nor memory. {why}"
)


class TorchAO(Engine):
    """torchao's ``convert_to_float8_training``."""

    kind = FP8BackendType.AO
    title = "torchao"
    package = "torchao"
    attribute = "ao_recipe_handler"

    def available(self) -> bool:
        """Whether torchao is installed."""
        return is_torchao_available()

    def recipe(self) -> AORecipeKwargs:
        """Return the recipe of ACCELERATE_FP8_PAD_INNER_DIM and ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER."""
        return AORecipeKwargs()

    def refusal(self, device: torch.device, recipe: AORecipeKwargs | None) -> str | None:
        """Return why float8 cannot run on a device; emulation runs on each, and on a CPU it is what we take."""
        if device.type in ("cpu", "xpu") or (recipe is not None and recipe.config.emulate):
            return None
        reason = super().refusal(device, recipe)
        return reason and f"{reason} (AORecipeKwargs(config=Float8LinearConfig(emulate=True)) runs anywhere, slowly)"

    def converted(self, model: nn.Module) -> int:
        """Return how many layers are torchao's."""
        from torchao.float8.float8_linear import Float8Linear

        return count(model, lambda module: isinstance(module, Float8Linear))

    def convert(self, model: nn.Module, recipe: AORecipeKwargs, **options: Any) -> None:
        """Replace linear layers by torchao's.

        Args:
            model: The model, before it is wrapped.
            recipe: The user's.
            **options: ``converter``, a function with the signature of ``convert_model_to_fp8_ao``; and ``config``, which
                replaces that of the recipe.
        """
        converter: Callable = options["converter"]
        converter(model, config=options.get("config", recipe.config), module_filter_func=recipe.module_filter_func)


def prepare(accelerator: "Accelerator", objects: Sequence[Any], converter: Callable) -> tuple[Any, ...]:
    """Convert the models among some objects to float8, and let their optimizers follow. All ranks.

    Args:
        accelerator: Its ``ao_recipe_handler`` says how.
        objects: What the user gave to ``prepare``.
        converter: ``convert_model_to_fp8_ao``, as the module of the Accelerator knows it at the call.

    Returns:
        The same objects, in their order.
    """
    engine, recipe = TorchAO(), accelerator.ao_recipe_handler
    config = settle(recipe.config, accelerator.device, accelerator.is_fsdp2)
    for model in new_models(accelerator, objects):
        if engine.converted(model):
            continue  # by its own library or by the user
        with followed(accelerator, model):
            engine.convert(model, recipe, converter=converter, config=config)
        if not engine.converted(model):
            _say_nothing_was_converted(model, recipe)
    return tuple(objects)


def settle(config: Any, device: torch.device, sharded: bool) -> Any:
    """Return torchao's settings as this run needs them.

    Args:
        config: A ``Float8LinearConfig``.
        device: Where this rank computes.
        sharded: Whether FSDP2 shards the model: only there are weights of torchao's own type gathered in 8 bits.
    """
    if config.enable_fsdp_float8_all_gather and not sharded:
        # Without FSDP2 the type gathers nothing, and neither safetensors nor DDP's buckets know it.
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
    if device.type == "cpu" and not config.emulate:
        config = dataclasses.replace(config, emulate=True)
        why = "Set AORecipeKwargs(config=Float8LinearConfig(emulate=True)) to say that this is meant."
        if not storage.process.current.get("process_index", 0):
            warn_user(_EMULATED.format(device="a CPU", why=why))
    return config


def _say_nothing_was_converted(model: nn.Module, recipe: AORecipeKwargs) -> None:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    odd = sum(1 for layer in layers if layer.in_features % 16 or layer.out_features % 16)
    rule = "module_filter_func took none of them" if recipe.module_filter_func else "the first and the last stay"
    warn_user(
        f"mixed_precision='fp8' converted no layer of {type(model).__name__}, which computes in bfloat16 then: it has "
        f"{len(layers)} linear layers, {odd} of them with a side that is no multiple of 16, and {rule}. Pass "
        "AORecipeKwargs(module_filter_func=...) to choose others, or use mixed_precision='bf16'.",
    )
