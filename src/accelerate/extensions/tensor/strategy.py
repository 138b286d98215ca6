"""The strategy of ranks that share the layers of a model and average no gradients."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from accelerate.checkpoint import save
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import Layout
from accelerate.modules import norms
from accelerate.runtime.run import Run
from accelerate.strategies.sharded import Sharded
from accelerate.strategies.sharded_io import ShardedIO


class TensorParallel(Sharded):
    """Layers that `TensorParallelism` has split; there are no replicas, so no gradients to average."""

    synchronises = False

    def check(self, accelerator: Run, objects: Sequence[Any]) -> None:
        """Refuse nothing: the mesh was checked when it was described."""

    def needs_wrapper(self, accelerator: Run, model: nn.Module) -> bool:
        """Never: the layers themselves are split."""
        return False

    def clip_grad_value(self, accelerator: Run, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        """Clip each element of the parts that this rank has. Collective: call on every rank."""
        norms.clip_grad_value(parameters, clip_value)


class TensorParallelIO(ShardedIO):
    """The states of layers that are sharded: gathered one by one, into files as from any other run."""

    gathers_new_memory = True
    saves_shards = False
    save_options = ()

    def layout(self, accelerator: Run, use_dcp: bool = True) -> Layout:
        """Return the layout of sharded tensors in a checkpoint: gathered."""
        return "full"

    def save_model(self, accelerator: Run, state: dict[str, Any], plan: SavePlan, index: int, **options: Any) -> None:
        """Write the gathered weights, from rank 0. Collective: call on every rank."""
        save.add_model(state, plan, index, **options)
