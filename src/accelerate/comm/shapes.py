"""What can be done with nested tensors without talking to other processes: moving, measuring, cutting, filling up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate.comm.nested import honor_type, leaves, like_mapping, recursively_apply
from accelerate.config.enums import at_public_path


@at_public_path
@dataclass
class TensorInformation:
    """The shape and dtype of a tensor, which one process sends ahead so that others can make room for it.

    Args:
        shape: its size.
        dtype: its element type.
    """

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """Say whether the argument is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


# Devices


def _mover(device: Any, non_blocking: bool) -> Callable[[Any], Any]:
    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(device, non_blocking=non_blocking)
        try:
            return item.to(device, non_blocking=non_blocking)
        except TypeError:  # a `to` of somebody's own that knows no such argument
            return item.to(device)

    return move


def send_to_device(
    tensor: Any,
    device: int | str | torch.device,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Move everything in a nested structure that has a `to` method to a device. Any rank, alone.

    Args:
        tensor: nested tensors, or other objects with a method `to(device)`; the rest stays as it is.
        device: where to.
        non_blocking: return before copies from pinned memory have finished.
        skip_keys: keys of mappings, at any depth, whose values stay where they are.

    Returns:
        The structure with its types kept; what is on the device already is not copied.

    Example:
        >>> send_to_device({"x": torch.ones(2), "text": "kept"}, "cpu")
        {'x': tensor([1., 1.]), 'text': 'kept'}
    """
    if isinstance(tensor, torch.Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    return _send(tensor, _mover(device, non_blocking), skipped)


def _send(data: Any, move: Callable[[Any], Any], skipped: tuple[str, ...]) -> Any:
    # Before the containers: a batch class may know best how to move itself.
    if hasattr(data, "to"):
        return move(data)
    if isinstance(data, (tuple, list)):
        return honor_type(data, (_send(item, move, skipped) for item in data))
    if isinstance(data, Mapping):
        items = {key: item if key in skipped else _send(item, move, skipped) for key, item in data.items()}
        return like_mapping(data, items)
    return data


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in a nested structure, or None if it has none."""
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, torch.Tensor)), None)


# Shapes


def get_data_structure(data: Any) -> Any:
    """Replace each tensor of a nested structure by its `TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Replace each tensor of a nested structure by its shape, as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Replace each `TensorInformation` of a nested structure by a tensor with unspecified content."""
    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def find_batch_size(data: Any) -> int:
    """Return the size of the first dimension of the first tensor in a nested structure.

    Raises:
        IndexError: the tensor is a scalar.
        TypeError: the first leaf is no tensor.
        ValueError: there are no leaves.

    Example:
        >>> find_batch_size({"x": torch.ones(4, 2)})
        4
    """
    if isinstance(data, (tuple, list, Mapping)):
        if len(data) == 0:
            raise ValueError(f"Cannot find the batch size of an empty {type(data).__name__}.")
        return find_batch_size(next(iter(data.values() if isinstance(data, Mapping) else data)))
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"Can only find the batch size of tensors, not of {type(data)}.")
    if data.ndim == 0:
        raise IndexError("Cannot find the batch size of a scalar tensor; it has no dimensions.")
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """Do what `find_batch_size` does, but return None where that fails."""
    try:
        return find_batch_size(data)
    except (IndexError, TypeError, ValueError):
        return None


def listify(data: Any) -> Any:
    """Replace each tensor of a nested structure by numbers, in nested lists."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Take a slice of the first dimension of every tensor in a nested structure.

    Args:
        data: nested tensors.
        tensor_slice: which part.
        process_index: not used; accepted for the sake of callers that pass it.
        num_processes: not used, likewise.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate the tensors at the same places of several nested structures.

    Args:
        data: structures of the same form. The leaves of a single one may be anything.
        dim: along which dimension.

    Raises:
        TypeError: a leaf of several structures is no tensor.

    Example:
        >>> concatenate([{"a": torch.ones(1)}, {"a": torch.zeros(1)}])
        {'a': tensor([1., 0.])}
    """
    first = data[0]
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate([item[i] for item in data], dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return like_mapping(first, {key: concatenate([item[key] for item in data], dim) for key in first})
    if not isinstance(first, torch.Tensor):
        if len(data) == 1:
            return first
        raise TypeError(f"Can only concatenate tensors, not {type(first)}.")
    return torch.cat(list(data), dim)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Lengthen nested tensors with zeros until they can be cut into equal pieces. Any rank, alone.

    Args:
        tensor: nested tensors.
        batch_size: their size along `dim`.
        num_processes: into how many pieces.
        dim: along which dimension.

    Returns:
        The structure with every tensor as long as the next multiple of `num_processes`.

    Raises:
        TypeError: a leaf is no tensor.

    Example:
        >>> pad_input_tensors(torch.ones(3), batch_size=3, num_processes=2)
        tensor([1., 1., 1., 0.])
    """
    length = -(-max(batch_size, 1) // num_processes) * num_processes

    def pad_input(item: torch.Tensor) -> torch.Tensor:
        return padded(item, dim, length, 0, False) if item.ndim > dim else item

    return recursively_apply(pad_input, tensor, error_on_other_type=True)


def padded(tensor: torch.Tensor, dim: int, length: int, value: Any, first: bool) -> torch.Tensor:
    """Return the tensor with `value` filled in until it is `length` long along `dim`."""
    missing = length - tensor.shape[dim]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    blank = tensor.new_full(shape, value)
    return torch.cat([blank, tensor] if first else [tensor, blank], dim)
