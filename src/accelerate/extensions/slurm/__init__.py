"""The facts of a run in the variables that Slurm and MPI launchers set in its processes."""

from accelerate.extension import Spec

_VARIABLES = (
    *("SLURM_STEP_ID", "SLURM_JOB_ID"),
    *("JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
)
SPEC = Spec("slurm", schedulers=dict.fromkeys(_VARIABLES, "accelerate.extensions.slurm.cluster"))
