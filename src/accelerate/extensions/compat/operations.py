"""Operations between processes that programs import from `accelerate.utils.operations`."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from accelerate import comm
from accelerate.comm.base import Communicator
from accelerate.comm.check import DistributedOperationException
from accelerate.comm.operations import TENSOR_INT_TO_DTYPE, TENSOR_TYPE_TO_INT, broadcast, compare_arguments
from accelerate.runtime import storage


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Return whether the argument is a tensor on an Intel GPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def _gpu_broadcast(data: Any, src: int = 0) -> Any:
    """Do what `broadcast` does."""
    return broadcast(data, src)


def _tpu_broadcast(tensor: Any, src: int = 0, name: str = "broadcast tensor") -> Any:
    """Do what `broadcast` does; `name` has no effect."""
    return broadcast(tensor, src)


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Tell all processes the shape and dtype of a tensor that only some of them have.

    Collective: call on every rank.

    Args:
        tensor: the tensor, or None on a rank that does not have it.

    Returns:
        The shape, int32 of shape (number of dimensions, 1), and the code of the dtype in `TENSOR_TYPE_TO_INT`.

    Raises:
        ValueError: no rank has a tensor, or they have different ones.
    """
    _, shape, code = _owner(comm.current(), tensor)
    return torch.tensor(shape, dtype=torch.int32).reshape(-1, 1), code


def _owner(communicator: Communicator, tensor: torch.Tensor | None) -> tuple[int, tuple[int, ...], int]:
    entry_of_rank = None if tensor is None else (tuple(tensor.shape), TENSOR_TYPE_TO_INT[tensor.dtype])
    entries = communicator.gather_object(entry_of_rank)
    owners = [rank for rank, entry in enumerate(entries) if entry is not None]
    if not owners or any(entries[rank] != entries[owners[0]] for rank in owners):
        raise ValueError(f"One tensor is expected, on one or more processes; the processes have {entries}.")
    return owners[0], *entries[owners[0]]


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Give all processes a tensor that only some of them have.

    Collective: call on every rank.

    Args:
        tensor: the tensor, or None on a rank that does not have it. If several ranks have one, the first one's counts.

    Returns:
        The tensor, on each process's device.

    Raises:
        ValueError: no rank has a tensor, or their shapes or dtypes differ.
    """
    communicator = comm.current()
    if communicator.world_size == 1 and tensor is not None:
        return tensor
    owner, shape, code = _owner(communicator, tensor)
    device = storage.process.current["device"]
    if tensor is None:
        tensor = torch.empty(shape, dtype=TENSOR_INT_TO_DTYPE[code], device=device)
    return communicator.broadcast(tensor.to(device), owner)


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a collective so that debug mode compares its first argument, or `tensor`, between the ranks first.

    A disagreement is a DistributedOperationException on all ranks.
    """

    @functools.wraps(function)
    def verified(*args: Any, **kwargs: Any) -> Any:
        if args or "tensor" in kwargs:
            data = kwargs["tensor"] if "tensor" in kwargs else args[0]
            compare_arguments(comm.current(), function.__name__, data, function.__module__)
        return function(*args, **kwargs)

    return verified


def chained_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function made of several collectives so that a disagreement within names this function."""

    @functools.wraps(function)
    def chained(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            name = f"{function.__module__}.{function.__name__}"
            raise DistributedOperationException(
                f"A collective inside `{name}` failed; the error above says why."
            ) from error

    return chained
