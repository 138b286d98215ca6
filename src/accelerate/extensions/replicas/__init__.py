"""Replica groups that train together through torchft, and continue without one that fails."""

from accelerate.extension import Spec

_HERE = "accelerate.extensions.replicas"

SPEC = Spec(
    "replicas",
    extension=f"{_HERE}.replicas:Replicas",
    attaches=lambda run: getattr(run, "fault_tolerance_handler", None) is not None,
    late=False,
    methods={"replica_batches": f"{_HERE}.replicas:replica_batches"},
    attributes={"replicas": f"{_HERE}.replicas:replicas"},
    handlers={"fault_tolerance_handler": f"{_HERE}.settings:FaultToleranceKwargs"},
)
