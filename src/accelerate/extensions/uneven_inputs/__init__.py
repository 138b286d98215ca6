"""Ranks with different numbers of batches."""

from accelerate.extension import Spec

SPEC = Spec(
    "uneven_inputs",
    methods={"join_uneven_inputs": "accelerate.extensions.uneven_inputs.context:join_uneven_inputs"},
)
