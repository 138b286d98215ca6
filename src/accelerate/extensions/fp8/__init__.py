"""Training in 8-bit floating point, by Transformer Engine or torchao."""

from typing import Any

from accelerate.extension import Spec

_RECIPES = "accelerate.extensions.fp8.recipes"
_FP8 = "accelerate.extensions.fp8.fp8"


def _attaches(run: Any) -> bool:
    return run.fp8_enabled or any(getattr(run, name, None) is not None for name in SPEC.handlers)


SPEC = Spec(
    "fp8",
    extension=f"{_FP8}:Fp8",
    attaches=_attaches,
    late=False,
    options="accelerate.extensions.fp8.options",
    methods={name: f"{_FP8}:{name}" for name in ("_prepare_te", "_prepare_ao", "_prepare_msamp")},
    attributes={"fp8_backend": f"{_FP8}:fp8_backend"},
    handlers={
        "fp8_recipe_handler": f"{_RECIPES}:FP8RecipeKwargs",
        "ao_recipe_handler": f"{_RECIPES}:AORecipeKwargs",
        "te_recipe_handler": f"{_RECIPES}:TERecipeKwargs",
        "msamp_recipe_handler": f"{_RECIPES}:MSAMPRecipeKwargs",
    },
)
