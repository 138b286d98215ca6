"""Features that the core does not know by name. Each folder can be deleted with its row here; see `accelerate.extension`."""

TABLE = (
    "batch_size",
    "big_models",
    "budget",
    "checks",
    "convert",
    "ema",
    "hang",
    "mpi",
    "object_store",
    "plan",
    "preemption",
    "reports",
    "sagemaker",
    "simulate",
    "to_fsdp2",
    "tpu",
    "trackers",
)
