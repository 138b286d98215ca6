"""Reports of precision, memory and throughput; what holds the memory of a run that runs out of it."""

from accelerate.extension import Spec

_METHODS = "accelerate.extensions.reports.methods"
SPEC = Spec(
    "reports",
    extension="accelerate.extensions.reports.out_of_memory:MemoryNotes",
    attaches=lambda run: True,
    late=False,
    methods={
        name: f"{_METHODS}:{name}" for name in ("precision_report", "memory_report", "throughput", "throughput_report")
    },
)
