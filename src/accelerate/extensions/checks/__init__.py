"""A comparison of the ranks' training states, before each N-th step."""

import os

from accelerate.extension import Spec

# The number of steps between comparisons, and whether outputs of modules are compared too.
CHECK_EVERY, CHECK_MODULES = "ACCELERATE_CHECK_EVERY", "ACCELERATE_CHECK_MODULES"
SPEC = Spec(
    "checks",
    extension="accelerate.extensions.checks.replicas:ReplicaCheck",
    attaches=lambda run: bool(os.environ.get(CHECK_EVERY)),
    late=False,
)
