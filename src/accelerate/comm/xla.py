"""Communication between XLA devices; torch_xla is imported when the first communicator is built."""

import importlib
import io
from collections.abc import Sequence
from typing import Any

import torch

from accelerate.comm.base import Communicator, check_reduction, mean_of


class XlaCommunicator(Communicator):
    """Collectives of torch_xla: tensors go through the graph, objects through its mesh service."""

    def __init__(self) -> None:
        self._model = importlib.import_module("torch_xla.core.xla_model")
        self._runtime = importlib.import_module("torch_xla.runtime")

    @property
    def rank(self) -> int:
        """The number of this process or, on older TPUs, of this thread."""
        return self._runtime.global_ordinal()

    @property
    def world_size(self) -> int:
        """How many of them there are."""
        return self._runtime.world_size()

    def gather_many(self, tensors: Sequence[torch.Tensor], structure: Any = None) -> list[torch.Tensor]:
        """Return every rank's tensors, concatenated; the graph is cut afterwards, as the results are about to be read."""
        gathered = [self._model.all_gather(tensor.contiguous()) for tensor in super().gather_many(tensors)]
        self._model.mark_step()
        return gathered

    def reduce_many(
        self, tensors: Sequence[torch.Tensor], op: str, structure: Any = None, operation: str = "reduce"
    ) -> list[torch.Tensor]:
        """Return the reductions over all ranks."""
        check_reduction(op)
        kind = self._model.REDUCE_SUM if op in ("sum", "mean") else op
        totals = [self._model.all_reduce(kind, tensor.clone()) for tensor in tensors]
        self._model.mark_step()
        return [mean_of(total, self.world_size) for total in totals] if op == "mean" else totals

    def broadcast_many(self, tensors: Sequence[torch.Tensor], src: int, structure: Any = None) -> list[torch.Tensor]:
        """Return rank `src`'s tensors: XLA broadcasts parameters only, so the others contribute zeros to a sum."""
        own = self.rank == src
        return self.reduce_many([tensor if own else torch.zeros_like(tensor) for tensor in tensors], "sum")

    def gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object."""
        buffer = io.BytesIO()
        torch.save(obj, buffer)
        payloads = self._model.rendezvous("accelerate.comm.xla.gather_object", buffer.getvalue())
        return [torch.load(io.BytesIO(payload), weights_only=False) for payload in payloads]

    def broadcast_object_list(self, objects: list[Any], src: int = 0) -> list[Any]:
        """Replace the elements by those of rank `src`."""
        objects[:] = self.gather_object(objects)[src]
        return objects

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self._model.rendezvous("accelerate.comm.xla.barrier")
