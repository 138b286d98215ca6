"""Pipelines that train."""

from typing import Any

from accelerate.config.strategies import StrategySpec, serving
from accelerate.extension import Spec


def _attaches(run: Any) -> bool:
    record = serving(run.state)  # Megatron-LM has its own pipelines
    return record is not None and record.name == "pipeline"


def is_pipeline(model: Any) -> bool:
    """Return whether a model is what `Accelerator.prepare_pipeline` returned. Not a collective."""
    return hasattr(model, "holdings")


def _has_stages(state: Any) -> bool:
    layout = getattr(state, "parallelism_config", None)
    return layout is not None and layout.pp_enabled


_STRATEGY = StrategySpec(
    "pipeline",
    "accelerate.extensions.pipeline.strategy:PipelineParallel",
    "accelerate.extensions.pipeline.strategy:PipelineIO",
    matches=_has_stages,
    has_model=is_pipeline,
    model_io="accelerate.extensions.pipeline.strategy:PipelineModels",
    order=10,  # other strategies serve states with stages, too
)
SPEC = Spec(
    "pipeline",
    extension="accelerate.extensions.pipeline.extension:Pipelines",
    attaches=_attaches,
    late=False,
    arrives=lambda models: any(hasattr(model, "_pp_stage") for model in models),
    needs="transformers",
    strategies=(_STRATEGY,),
    methods={"prepare_pipeline": "accelerate.extensions.pipeline.pipeline:prepare_pipeline"},
)
