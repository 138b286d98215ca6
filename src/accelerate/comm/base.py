"""The contract of a communicator. Its defaults work for a single process."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from accelerate.base.nested import outline, rebuild

REDUCTIONS = ("sum", "mean", "max", "min")


class DistributedOperationException(Exception):
    """The ranks call an operation differently: another kind, or another structure, shape or dtype of its argument.

    All ranks raise it, so that the run ends at once instead of hanging.
    """

    __module__ = "accelerate.utils.operations"  # the path in pickles


class Communicator:
    """Exchanges tensors and objects between all processes. The methods of this class work for a single process.

    Every rank must call every method, in the same order, with nested tensors of the same structure, shapes and dtypes. Tensors stay
    on their device, arguments are not changed unless said otherwise, and results do not require gradients.
    """

    rank: int = 0
    world_size: int = 1
    group: Any = None

    def all_gather(self, data: Any) -> Any:
        """Return every rank's tensors, each concatenated along dim 0; scalars become a vector."""
        return self._collect("gather", None, data)

    def all_reduce(self, data: Any, op: str = "sum", operation: str = "reduce", note: str = "") -> Any:
        """Return element-wise reductions ("sum", "mean", "max", "min"); integers' mean is float.

        Errors name `operation`; ranks must also agree on `note`.
        """
        if op not in REDUCTIONS:
            raise ValueError(f"Unknown reduction {op!r}; choose one of {', '.join(REDUCTIONS)}.")
        return self._collect(operation, op, data, note)

    def broadcast(self, data: Any, src: int = 0) -> Any:
        """Return rank `src`'s tensors."""
        if not 0 <= src < self.world_size:
            raise ValueError(f"There is no process {src} to broadcast from; they go from 0 to {self.world_size - 1}.")
        return self._collect("broadcast", src, data)

    def _collect(self, operation: str, argument: str | int | None, data: Any, note: str = "") -> Any:
        tensors: list[torch.Tensor] = []
        structure = outline(data, tensors, operation) + note
        if any(hasattr(tensor, "to_local") for tensor in tensors):
            raise ValueError(
                f"{operation} got a DTensor, of which each rank has a part. Pass tensor.full_tensor() for the full tensor, or tensor.to_local() for the part."
            )
        if argument == "mean":  # sums of short integers and truth values would not fit into their dtype
            tensors = [
                tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.long() for tensor in tensors
            ]
        # Scalars travel as vectors.
        ready = [tensor.detach() if tensor.ndim else tensor.detach().reshape(1) for tensor in tensors]
        results = self._exchange(operation, argument, structure, ready)
        if argument == "mean":
            results = [_divided(total, self.world_size) for total in results]
        if argument is not None:
            results = [result.view(tensor.shape) for result, tensor in zip(results, tensors, strict=True)]
        return rebuild(data, results)

    def _exchange(
        self, operation: str, argument: str | int | None, structure: str, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Gather (`argument` is None), reduce (its name) or broadcast (its source) tensors that have at least one dimension."""
        return [tensor.clone() for tensor in tensors]

    def is_same(self, value: Any) -> bool:
        """Return whether all ranks pass values with the same `repr`."""
        return len(set(self.gather_object(checksum(value)))) == 1

    def gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object (anything that pickles), in the order of the ranks."""
        return [obj]

    def broadcast_object_list(self, objects: list[Any], src: int = 0) -> list[Any]:
        """Replace the elements of a list, in place, by those of rank `src`, and return it."""
        return objects

    def barrier(self) -> None:
        """Wait until every rank has come here."""


def checksum(value: Any) -> int:
    """Return a number of 56 bits that is equal for values with equal `repr`, in every process (unlike `hash`)."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")


def _divided(total: torch.Tensor, count: int) -> torch.Tensor:
    """Divide a sum over ranks by their number, in place where the dtype can hold the mean."""
    return total.div_(count) if total.is_floating_point() or total.is_complex() else total / count
