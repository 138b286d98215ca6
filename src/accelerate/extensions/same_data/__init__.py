"""A comparison of the orders and datasets that ranks read."""

from accelerate.extension import Spec

SPEC = Spec(
    "same_data",
    extension="accelerate.extensions.same_data.agreement:SameData",
    attaches=lambda run: run.num_processes > 1,
)
