"""Megatron core: models of transformers, sharded over ranks and trained by its schedules and optimizers.

Source: https://docs.nvidia.com/megatron-core/developer-guide/latest/
"""

from accelerate.config.enums import DistributedType
from accelerate.config.strategies import StrategySpec, Traits
from accelerate.extension import Spec

_HERE = "accelerate.extensions.megatron"
SPEC = Spec(
    "megatron",
    options=f"{_HERE}.options",
    methods={"_prepare_megatron_lm": f"{_HERE}.strategy:_prepare_megatron_lm"},
    strategies=(
        StrategySpec(
            "megatron",
            f"{_HERE}.strategy:MegatronLM",
            f"{_HERE}.checkpoint:MegatronIO",
            kinds=(DistributedType.MEGATRON_LM,),
            traits=Traits(custom_device_placement=True, scales_loss=False, clips_by_value=False, places_batches=False),
            title="Megatron-LM",
            switch="use_megatron_lm",
            feature="megatron",
            section="megatron_lm_config",
            plugin="megatron_lm_plugin",
            plugin_class=f"{_HERE}.plugin:MegatronLMPlugin",
            sets_switch=True,  # `is_megatron_lm_available` looks there.
            order=5,  # Its pipelines are its own.
        ),
    ),
)
