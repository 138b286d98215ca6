"""One process: everything it would hear from the others, it knows."""

from typing import Any

import torch

from accelerate.comm.base import Communicator, check_reduction


class Single(Communicator):
    """The communicator of a process that is alone; returns what it is given."""

    @property
    def rank(self) -> int:
        """0."""
        return 0

    @property
    def world_size(self) -> int:
        """1."""
        return 1

    def all_gather_into_list(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor in a list."""
        return [tensor]

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return the tensor."""
        check_reduction(op)
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def gather_object(self, obj: Any) -> list[Any]:
        """Return the object in a list."""
        return [obj]

    def broadcast_object_list(self, objects: list[Any], src: int = 0) -> list[Any]:
        """Return the list."""
        return objects

    def barrier(self) -> None:
        """Return at once."""
