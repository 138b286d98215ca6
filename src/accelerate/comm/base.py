"""The contract of a communicator."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

REDUCTIONS = ("sum", "mean", "max", "min")


class Communicator(ABC):
    """Exchanges tensors and objects between all processes of a run.

    Every method must be called by every rank, in the same order. Tensors stay on their device; none of the arguments is
    changed unless said otherwise. Results do not require gradients.
    """

    group: Any = None

    @property
    @abstractmethod
    def rank(self) -> int:
        """The number of this process."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many processes there are."""

    @abstractmethod
    def all_gather_into_list(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in the order of the ranks.

        Args:
            tensor: of the same shape and dtype on every rank.
        """

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor, concatenated along the first dimension; scalars become a vector."""
        return torch.cat(
            [piece.reshape(1) if piece.ndim == 0 else piece for piece in self.all_gather_into_list(tensor)]
        )

    def gather_many(
        self, tensors: Sequence[torch.Tensor], structure: Any = None, operation: str = "gather"
    ) -> list[torch.Tensor]:
        """Do `all_gather` for several tensors at once.

        Args:
            tensors: the tensors.
            structure: what they belong to; ranks that pass different ones are an error where the communicator checks.
            operation: what the gathering is part of, for messages.
        """
        return [self.all_gather(tensor) for tensor in tensors]

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return the element-wise reduction over all ranks.

        Args:
            tensor: of the same shape and dtype on every rank.
            op: "sum", "mean", "max" or "min". The mean of integers is a float tensor.
        """

    def reduce_many(self, tensors: Sequence[torch.Tensor], op: str, structure: Any = None) -> list[torch.Tensor]:
        """Do `all_reduce` for several tensors at once; arguments as in `gather_many`."""
        return [self.all_reduce(tensor, op) for tensor in tensors]

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return rank `src`'s tensor; of the same shape and dtype on every rank."""

    def broadcast_many(self, tensors: Sequence[torch.Tensor], src: int, structure: Any = None) -> list[torch.Tensor]:
        """Do `broadcast` for several tensors at once; arguments as in `gather_many`."""
        return [self.broadcast(tensor, src) for tensor in tensors]

    @abstractmethod
    def gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object (anything that pickles), in the order of the ranks."""

    @abstractmethod
    def broadcast_object_list(self, objects: list[Any], src: int = 0) -> list[Any]:
        """Replace the elements of a list, in place, by those of rank `src`, and return it."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has come here."""


def check_reduction(op: str) -> None:
    """Raise a ValueError for an unknown reduction; every rank fails alike, before anything is exchanged."""
    if op not in REDUCTIONS:
        raise ValueError(f"Unknown reduction {op!r}; choose one of {', '.join(REDUCTIONS)}.")


def mean_of(total: torch.Tensor, count: int) -> torch.Tensor:
    """Divide a sum over ranks by their number, in place where the dtype can hold the mean."""
    return total.div_(count) if total.is_floating_point() or total.is_complex() else total / count
