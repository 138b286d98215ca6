"""DeepSpeed: an engine that owns the model, its gradients, and the optimizer's step."""

from accelerate.config.enums import DistributedType
from accelerate.config.strategies import StrategySpec, Traits
from accelerate.extension import Spec

_HERE = "accelerate.extensions.deepspeed"
SPEC = Spec(
    "deepspeed",
    options=f"{_HERE}.options",
    runners={"deepspeed": f"{_HERE}.runner"},
    methods={name: f"{_HERE}.together:{name}" for name in ("_prepare_deepspeed", "deepspeed_ulysses_dl_adapter")},
    strategies=(
        StrategySpec(
            "deepspeed",
            f"{_HERE}.engine:DeepSpeed",
            f"{_HERE}.state_io:DeepSpeedIO",
            kinds=(DistributedType.DEEPSPEED,),
            traits=Traits(
                custom_device_placement=True,
                scales_loss=False,
                clips_by_value=False,
                needs_group=True,
                own_groups=True,
                casts_itself=True,
                steps_in_backward=True,
            ),
            title="DeepSpeed",
            switch="use_deepspeed",
            feature="deepspeed",
            section="deepspeed_config",
            runner="deepspeed",
            joins=f"{_HERE}.groups:join",
            plugin="deepspeed_plugins",
            plugin_class=f"{_HERE}.plugin:DeepSpeedPlugin",
            plugin_set=f"{_HERE}.selection:set_up",
            plugin_again=f"{_HERE}.selection:refuse_another_engine",
            sets_switch=True,
            layout=f"{_HERE}.zero:ZeroLayout",
            wrappers=(("deepspeed.runtime.engine", "DeepSpeedEngine"),),
            order=4,  # Its switch is looked at before those of other engines.
        ),
    ),
)
