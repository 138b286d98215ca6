"""Tensor parallelism alone: every rank works on the same batch, with its part of each layer."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from accelerate.backends.sharded import Sharded
from accelerate.checkpoint import save
from accelerate.checkpoint.state import Layout
from accelerate.modules import norms
from accelerate.runtime.run import Run


class TensorParallel(Sharded):
    """Layers that `parallel.tensor` has split; there are no replicas, so no gradients to average."""

    name = "tensor_parallel"
    synchronises = False
    # The weights are gathered one after the other into a file that anybody reads.
    saves_shards = False
    save_options = ()

    def check(self, accelerator: Run, objects: Sequence[Any]) -> None:
        """Refuse nothing: the mesh was checked when it was described."""

    def needs_wrapper(self, accelerator: Run, model: nn.Module) -> bool:
        """Never: the layers themselves are split."""
        return False

    def clip_grad_value(self, accelerator: Run, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        """Clip each element of the parts that this rank has. All ranks."""
        norms.clip_grad_value(parameters, clip_value)

    def layout(self, accelerator: Run, kind: str, use_dcp: bool = True) -> Layout:
        """Return how a checkpoint keeps what is split: gathered, as from any other run."""
        return "full"

    def save_model(self, accelerator: Run, state: dict[str, Any], folder: str, index: int, **options: Any) -> None:
        """Write the gathered weights, from rank 0. All ranks."""
        save.write_model(state, folder, index, **options)
