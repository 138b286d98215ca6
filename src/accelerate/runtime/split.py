"""Cutting inputs into one piece per process."""

import sys
from collections.abc import Mapping
from typing import Any

import torch


def bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where the piece of a rank starts and ends; the first ranks take one more where it does not divide.

    Example:
        >>> [bounds(5, rank, 3) for rank in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    share, extra = divmod(length, world_size)
    start = rank * share + min(rank, extra)
    return start, start + share + (rank < extra)


def _is_dataset(value: Any) -> bool:
    module = sys.modules.get("datasets")  # whoever holds a Dataset has imported the library
    return module is not None and isinstance(value, getattr(module, "Dataset", ()))


def _piece(value: Any, length: int, rank: int, world_size: int, padded: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _piece(item, length, rank, world_size, padded) for key, item in value.items()}
    start, end = bounds(length, rank, world_size)
    missing = -(-length // world_size) - (end - start) if padded and length else 0
    if isinstance(value, (list, tuple)):
        return value[start:end] + value[-1:] * missing
    if isinstance(value, torch.Tensor):
        piece = value[start:end]
        return torch.cat([piece, *[value[-1:]] * missing]) if missing else piece
    if _is_dataset(value):
        return value.select([*range(start, end), *[length - 1] * missing])
    return value


def piece(inputs: Any, rank: int, world_size: int, padded: bool) -> Any:
    """Return the piece of the inputs that belongs to a rank.

    Args:
        inputs: a list, tuple, tensor (cut along its first dimension), `datasets.Dataset`, or a dictionary of such values
            of one length. Everything else goes to every rank whole.
        rank: whose piece.
        world_size: how many pieces.
        padded: repeat the last element of `inputs` until all pieces are as long as the first.

    Raises:
        TypeError: `inputs`, or a value of the dictionary, has no length.
        ValueError: the values of a dictionary differ in length.
    """
    if world_size == 1:
        return inputs
    if not isinstance(inputs, Mapping):
        return _piece(inputs, len(inputs), rank, world_size, padded)
    lengths = {key: len(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"All values in the dictionary must have the same length, but their lengths are {lengths}.")
    return _piece(inputs, next(iter(lengths.values()), 0), rank, world_size, padded)
