"""The contract of a communicator; its defaults are a process that is alone."""

from collections.abc import Sequence
from typing import Any

import torch

REDUCTIONS = ("sum", "mean", "max", "min")


class Communicator:
    """Exchanges tensors and objects between all processes; what is here serves a process that is alone.

    Every rank must call every method, in the same order. Tensors stay on their device, arguments are not changed unless
    said otherwise, and results do not require gradients.
    """

    rank: int = 0
    world_size: int = 1
    group: Any = None

    def gather_many(self, tensors: Sequence[torch.Tensor], structure: Any = None) -> list[torch.Tensor]:
        """Return every rank's tensors, each concatenated along dim 0; scalars become a vector."""
        return [tensor if tensor.ndim else tensor.reshape(1) for tensor in tensors]

    def reduce_many(
        self, tensors: Sequence[torch.Tensor], op: str, structure: Any = None, operation: str = "reduce"
    ) -> list[torch.Tensor]:
        """Return element-wise reductions ("sum", "mean", "max", "min"); integers' mean is float."""
        check_reduction(op)
        return list(tensors)

    def broadcast_many(self, tensors: Sequence[torch.Tensor], src: int, structure: Any = None) -> list[torch.Tensor]:
        """Return rank `src`'s tensors; arguments as in `gather_many`."""
        return list(tensors)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Do `gather_many` for one tensor."""
        return self.gather_many([tensor])[0]

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Do `reduce_many` for one tensor."""
        return self.reduce_many([tensor], op)[0]

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Do `broadcast_many` for one tensor."""
        return self.broadcast_many([tensor], src)[0]

    def gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object (anything that pickles), in the order of the ranks."""
        return [obj]

    def broadcast_object_list(self, objects: list[Any], src: int = 0) -> list[Any]:
        """Replace the elements of a list, in place, by those of rank `src`, and return it."""
        return objects

    def barrier(self) -> None:
        """Wait until every rank has come here."""


def check_reduction(op: str) -> None:
    """Raise a ValueError for an unknown reduction; every rank fails alike, before anything is exchanged."""
    if op not in REDUCTIONS:
        raise ValueError(f"Unknown reduction {op!r}; choose one of {', '.join(REDUCTIONS)}.")


def mean_of(total: torch.Tensor, count: int) -> torch.Tensor:
    """Divide a sum over ranks by their number, in place where the dtype can hold the mean."""
    return total.div_(count) if total.is_floating_point() or total.is_complex() else total / count
