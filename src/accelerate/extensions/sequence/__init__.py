"""Context and sequence parallelism: ranks that share sequences."""

from typing import Any

from accelerate.config.strategies import traits_of
from accelerate.extension import Spec


def _attaches(run: Any) -> bool:
    layout = run.parallelism_config
    shares = layout is not None and (layout.cp_enabled or layout.sp_enabled)
    return shares and not traits_of(run.distributed_type).own_groups


SPEC = Spec(
    "sequence",
    extension="accelerate.extensions.sequence.extension:SharedSequences",
    attaches=_attaches,
    late=False,
    options="accelerate.extensions.sequence.options",
    dimensions={
        "cp": "accelerate.extensions.sequence.config:TorchContextParallelConfig",
        "sp": "accelerate.extensions.sequence.config:DeepSpeedSequenceParallelConfig",
    },
    methods={
        "_prepare_cp": "accelerate.extensions.sequence.sequence:_prepare_cp",
        "maybe_context_parallel": "accelerate.extensions.sequence.context:maybe_context_parallel",
    },
)
