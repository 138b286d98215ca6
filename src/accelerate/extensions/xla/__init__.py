"""torch_xla: data parallelism of TPUs, whose steps are traced."""

from accelerate.base.environment import parse_flag_from_env
from accelerate.config.enums import DistributedType
from accelerate.config.strategies import StrategySpec, Traits, traits_of
from accelerate.extension import Spec

_HERE = "accelerate.extensions.xla"
DOWNCAST_FLAG = "ACCELERATE_DOWNCAST_BF16"
SPEC = Spec(
    "xla",
    extension=f"{_HERE}.strategy:ReduceBeforeStep",
    attaches=lambda run: traits_of(run.distributed_type).traced or parse_flag_from_env(DOWNCAST_FLAG),
    late=False,
    strategies=(
        StrategySpec(
            "xla",
            f"{_HERE}.strategy:XLA",
            kinds=(DistributedType.XLA,),
            traits=Traits(torch_distributed=False, traced=True),
            communicator=f"{_HERE}.communicator:XlaCommunicator",
            loader=f"{_HERE}.loader:loader_class",
            wrappers=(
                ("torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel", "XlaFullyShardedDataParallel"),
                ("torch_xla.experimental.spmd_fully_sharded_data_parallel", "SpmdFullyShardedDataParallel"),
            ),
        ),
    ),
)
