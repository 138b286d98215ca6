"""Communication between XLA devices; torch_xla is imported when the first communicator is built."""

import importlib
import io
from collections.abc import Sequence
from typing import Any

import torch

from accelerate.comm.base import Communicator


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

    def _exchange(
        self, operation: str, argument: str | int | None, structure: str, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        if argument is None:
            results = [self._model.all_gather(tensor.contiguous()) for tensor in tensors]
        else:
            kind = argument if argument in ("max", "min") else self._model.REDUCE_SUM
            # XLA broadcasts parameters only, so the others contribute zeros to a sum.
            blank = isinstance(argument, int) and argument != self.rank
            contributions = [torch.zeros_like(tensor) if blank else tensor.clone() for tensor in tensors]
            results = [self._model.all_reduce(kind, tensor) for tensor in contributions]
        self._model.mark_step()  # the results are about to be read
        return results

    def gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object."""
        buffer = io.BytesIO()
        torch.save(obj, buffer)
        payloads = self._model.rendezvous("accelerate.extensions.xla.gather_object", buffer.getvalue())
        return [torch.load(io.BytesIO(payload), weights_only=False) for payload in payloads]

    def broadcast_object_list(self, objects: list[Any], src: int = 0) -> list[Any]:
        """Replace the elements by those of rank `src`."""
        objects[:] = self.gather_object(objects)[src]
        return objects

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self._model.rendezvous("accelerate.extensions.xla.barrier")
