"""A comparison of the models that ranks shard."""

from accelerate.config.strategies import traits_of
from accelerate.extension import Spec

SPEC = Spec(
    "same_model",
    extension="accelerate.extensions.same_model.extension:SameModel",
    attaches=lambda run: run.num_processes > 1 and traits_of(run.distributed_type).sharded,
    late=False,
)
