"""Processes that are bound to the CPU cores next to their GPU."""

from accelerate.extension import Spec

SPEC = Spec(
    "affinity",
    options="accelerate.extensions.affinity.options",
    started={"enable_cpu_affinity": "accelerate.extensions.affinity.binding:bind"},
)
