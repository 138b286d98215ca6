"""Communication between XLA devices; torch_xla is imported when the first communicator is built."""

import importlib
import io
from typing import Any

import torch

from accelerate.comm.base import Communicator, check_reduction, mean_of


class XlaCommunicator(Communicator):
    """Collectives of torch_xla: tensors go through the graph, objects through its mesh service.

    Source: https://pytorch.org/xla/master/learn/api-guide.html
    """

    def __init__(self) -> None:
        self._model = importlib.import_module("torch_xla.core.xla_model")
        self._runtime = importlib.import_module("torch_xla.runtime")

    @property
    def rank(self) -> int:
        """The number of this process, as the XLA runtime counts."""
        return self._runtime.global_ordinal()

    @property
    def world_size(self) -> int:
        """How many processes the XLA runtime knows."""
        return self._runtime.world_size()

    def all_gather_into_list(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor."""
        flat = self.all_gather(tensor)
        return list(flat) if tensor.ndim == 0 else list(flat.split(tensor.shape[0]))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor, concatenated; the graph is cut afterwards, as the result is about to be read."""
        tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
        gathered = self._model.all_gather(tensor.contiguous())
        self._model.mark_step()
        return gathered

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return the reduction over all ranks."""
        check_reduction(op)
        kind = self._model.REDUCE_SUM if op in ("sum", "mean") else op
        total = self._model.all_reduce(kind, tensor.clone())
        self._model.mark_step()
        return mean_of(total, self.world_size) if op == "mean" else total

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return rank `src`'s tensor: XLA broadcasts parameters only, so the others contribute zeros to a sum."""
        return self.all_reduce(tensor if self.rank == src else torch.zeros_like(tensor), "sum")

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
