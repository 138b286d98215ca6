"""Pipelines that train."""

from typing import Any

from accelerate.config.strategies import traits_of
from accelerate.extension import Spec


def _attaches(run: Any) -> bool:
    layout = run.parallelism_config
    return layout is not None and layout.pp_enabled and not traits_of(run.distributed_type).megatron


SPEC = Spec(
    "pipeline",
    extension="accelerate.extensions.pipeline.extension:Pipelines",
    attaches=_attaches,
    arrives=lambda models: any(hasattr(model, "_pp_stage") for model in models),
    methods={"prepare_pipeline": "accelerate.training.pipeline:prepare_pipeline"},
)
