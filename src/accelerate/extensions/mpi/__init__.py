"""Processes that mpirun starts."""

from accelerate.extension import Spec

SPEC = Spec(
    "mpi",
    options="accelerate.extensions.mpi.options",
    runners={"mpi": "accelerate.extensions.mpi.runner"},
)
