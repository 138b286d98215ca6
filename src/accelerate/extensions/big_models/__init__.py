"""Models larger than one device: sizes, memory budgets, device maps, placement, loading, offload files.

Read in this order: `tensors` (names, ties and bytes), `planner` and `device_map` (what devices hold, what goes where),
`placement` (moving one tensor, quantised ones too), `store` (weights that are kept elsewhere), `loading` (checkpoint to model),
`weights` (where all of a model's are), `hooks_base`, `align`, `hooks` (who gets a hook), `prefetch` (reading ahead), `big_modeling`.
The public names are in `accelerate.big_modeling`, `accelerate.hooks`, `accelerate.utils.modeling` and `accelerate.utils.offload`.
"""

from typing import Any

from accelerate.extension import Spec


def _are_placed(models: list[Any]) -> bool:
    return any("hf_device_map" in vars(module) for model in models for module in model.modules())


SPEC = Spec(
    "big_models", extension="accelerate.extensions.big_models.extension:PlacedModels", arrives=_are_placed, late=False
)
