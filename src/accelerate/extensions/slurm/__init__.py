"""What Slurm and MPI launchers say about a run in the variables of its processes."""

from accelerate.extension import Spec

_VARIABLES = (
    *("SLURM_STEP_ID", "SLURM_JOB_ID"),
    *("JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
)
SPEC = Spec("slurm", schedulers=dict.fromkeys(_VARIABLES, "accelerate.extensions.slurm.cluster"))
