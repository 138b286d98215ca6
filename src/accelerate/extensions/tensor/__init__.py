"""Tensor and expert parallelism, and models that arrive sharded."""

from typing import Any

from accelerate.config.strategies import REPLICAS, StrategySpec, traits_of
from accelerate.extension import Spec


def _attaches(run: Any) -> bool:
    layout = run.parallelism_config
    sharded = layout is not None and (layout.tp_enabled or layout.ep_size > 1)
    return sharded and not traits_of(run.distributed_type).own_groups


def _arrives(models: list[Any]) -> bool:
    from accelerate.modules.unwrap import model_has_dtensor  # it imports torch

    return any(map(model_has_dtensor, models))


def _is_alone(state: Any) -> bool:
    layout = getattr(state, "parallelism_config", None)
    return state.distributed_type in REPLICAS and layout is not None and layout.tp_enabled


_STRATEGY = StrategySpec(
    "tensor_parallel",
    "accelerate.extensions.tensor.strategy:TensorParallel",
    "accelerate.extensions.tensor.strategy:TensorParallelIO",
    matches=_is_alone,
    order=20,  # before data parallelism
)
SPEC = Spec(
    "tensor",
    extension="accelerate.extensions.tensor.extension:TensorParallelism",
    attaches=_attaches,
    late=False,
    arrives=_arrives,
    needs="torch.distributed.tensor",
    strategies=(_STRATEGY,),
    dimensions={"tp": "accelerate.extensions.tensor.config:TorchTensorParallelConfig"},
    methods={"_prepare_tp": "accelerate.extensions.tensor.tensor:_prepare_tp"},
)
