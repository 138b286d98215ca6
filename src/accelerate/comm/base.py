"""The contract of a communicator; its defaults are a process that is alone."""

from collections.abc import Sequence
from typing import Any

import torch

REDUCTIONS = ("sum", "mean", "max", "min")


class Communicator:
    """Exchanges tensors and objects between all processes of a run. What is here serves a process that is alone.

    Every method must be called by every rank, in the same order. Tensors stay on their device; none of the arguments is
    changed unless said otherwise. Results do not require gradients.

    Attributes:
        rank: the number of this process.
        world_size: how many processes there are.
        group: the process group, where there is one.
    """

    rank: int = 0
    world_size: int = 1
    group: Any = None

    def gather_many(
        self, tensors: Sequence[torch.Tensor], structure: Any = None, operation: str = "gather"
    ) -> list[torch.Tensor]:
        """Return every rank's tensors, each concatenated along its first dimension; scalars become a vector.

        Args:
            tensors: each of the same shape and dtype on every rank.
            structure: what they belong to; ranks that pass different ones are an error where the communicator checks.
            operation: what the gathering is part of, for messages.
        """
        return [tensor if tensor.ndim else tensor.reshape(1) for tensor in tensors]

    def reduce_many(self, tensors: Sequence[torch.Tensor], op: str, structure: Any = None) -> list[torch.Tensor]:
        """Return the element-wise reductions of several tensors over all ranks.

        Args:
            tensors: as in `gather_many`.
            op: "sum", "mean", "max" or "min". The mean of integers is a float tensor.
            structure: as in `gather_many`.
        """
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
