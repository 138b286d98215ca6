"""FSDP in its first version: torch's FullyShardedDataParallel, which flattens parameters."""

import sys
from typing import Any

from accelerate.config.enums import DistributedType
from accelerate.config.strategies import SHARDED, StrategySpec
from accelerate.extension import Spec


def is_fsdp1(model: Any) -> bool:
    """Return whether a model is, or contains, a FullyShardedDataParallel. Not a collective."""
    # While the module is not imported there is no such model, and importing it is slow.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for kind in set(map(type, model.modules())):
            if issubclass(kind, fsdp.FullyShardedDataParallel):
                return True
    return False


_HERE = "accelerate.extensions.fsdp1"
SPEC = Spec(
    "fsdp1",
    strategies=(
        StrategySpec(
            "fsdp1",
            f"{_HERE}.strategy:FSDP1",
            f"{_HERE}.state_io:FSDP1IO",
            kinds=(DistributedType.FSDP,),  # The core's FSDP2 is asked before, and has the plugin and the options.
            traits=SHARDED,
            has_model=is_fsdp1,
            model_io=f"{_HERE}.state_io:FSDP1Models",
            wrappers=(("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),),
        ),
    ),
)
