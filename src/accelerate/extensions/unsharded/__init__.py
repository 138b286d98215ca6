"""Gradients of parameters that every rank of a sharded model has unsharded."""

from accelerate.config.strategies import traits_of
from accelerate.extension import Spec

SPEC = Spec(
    "unsharded",
    extension="accelerate.extensions.unsharded.averaging:UnshardedParameters",
    attaches=lambda run: traits_of(run.distributed_type).sharded,
    late=False,
)
