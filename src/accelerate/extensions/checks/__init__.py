"""A comparison of what the ranks train, before each N-th step."""

import os

from accelerate.extension import Spec

# Before each how many-th step the ranks compare what they train, and whether they look at the outputs of modules, too.
CHECK_EVERY, CHECK_MODULES = "ACCELERATE_CHECK_EVERY", "ACCELERATE_CHECK_MODULES"
SPEC = Spec(
    "checks",
    extension="accelerate.extensions.checks.replicas:ReplicaCheck",
    attaches=lambda run: bool(os.environ.get(CHECK_EVERY)),
    late=False,
)
