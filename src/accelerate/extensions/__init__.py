"""Features that the core does not know by name. Each folder can be deleted with its row here; see `accelerate.extension`."""

# Each folder, in the order in which their hooks are called where their `order` is equal. Options with the same position in the table, and
# runners that would start the same run, follow it, too.
TABLE = (
    "checks",
    "ema",
    "preemption",
    "reports",
    "sagemaker",
    "tpu",
    "mpi",
    "machines",
    "slurm",
    "notebook",
    "local_sgd",
    "affinity",
)
