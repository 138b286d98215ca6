"""Tensor and expert parallelism, and models that arrive sharded."""

from typing import Any

from accelerate.config.strategies import traits_of
from accelerate.extension import Spec
from accelerate.modules.unwrap import model_has_dtensor


def _attaches(run: Any) -> bool:
    layout = run.parallelism_config
    sharded = layout is not None and (layout.tp_enabled or layout.ep_size > 1)
    return sharded and not traits_of(run.distributed_type).deepspeed


SPEC = Spec(
    "tensor",
    extension="accelerate.extensions.tensor.extension:TensorParallelism",
    attaches=_attaches,
    arrives=lambda models: any(map(model_has_dtensor, models)),
    methods={"_prepare_tp": "accelerate.parallel.tensor:_prepare_tp"},
)
