"""What Slurm and MPI launchers say about a run in the variables of its processes."""

from accelerate.extension import Spec

SPEC = Spec("slurm")
