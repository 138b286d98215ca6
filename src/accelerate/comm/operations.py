"""Operations on nested tensors: between processes, to devices, and on their shapes.

"Nested" means lists, tuples, named tuples and mappings, in any depth, with tensors as leaves. The functions named
`..._with` take the communicator to use; the others use that of the process's state.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from accelerate import comm

# Libraries compile the source of these functions in this namespace, so it has all names that they use.
from accelerate.base.nested import (  # noqa: F401
    TENSOR,
    concatenate,
    filled,
    find_batch_size,
    honor_type,
    is_namedtuple,
    is_torch_tensor,
    leaves,
    like_mapping,
    outline,
    over_leaves,
    padded,
    rebuild,
    recursively_apply,
    send_to_device,
)
from accelerate.comm.base import Communicator, DistributedOperationException  # noqa: F401
from accelerate.runtime import storage

_PUBLIC_PATH = "accelerate.utils.operations"  # in messages, and in pickles


class CannotPadNestedTensorWarning(UserWarning):
    """Given when `pad_across_processes` meets a `torch.nested` tensor, which it leaves as it is."""

    __module__ = "accelerate.utils.operations"  # the path in pickles


# Collectives


def compare_arguments(communicator: Communicator, operation: str, data: Any, module: str = _PUBLIC_PATH) -> None:
    """Compare the arguments of a collective between the ranks, in debug mode."""
    if storage.process.current.get("debug") and communicator.world_size > 1:
        if (checks := comm.operation_checks()) is None:
            raise ValueError(
                "ACCELERATE_DEBUG_MODE needs an extension with `operation_checks` that is not in this installation of accelerate. "
                "Remove the setting, or install the complete package."
            )
        checks.compare_arguments(communicator, f"{module}.{operation}", data)


def gather_with(communicator: Communicator, tensor: Any, differentiable: bool = False) -> Any:
    """Do what `gather` does, with a given communicator."""
    if communicator.world_size == 1:
        return tensor
    compare_arguments(communicator, "gather", tensor)
    if differentiable:
        return over_leaves(lambda leaf: _Gathered.apply(leaf, communicator), tensor)
    return communicator.all_gather(tensor)


class _Gathered(torch.autograd.Function):
    """Gather the tensors of all ranks. Each rank's gradient is the sum of the gradients of all ranks' losses for its tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, communicator: Communicator) -> torch.Tensor:
        ctx.communicator, ctx.shape = communicator, tensor.shape
        return communicator.all_gather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = ctx.communicator.all_reduce(gradient, "sum", "the backward pass of gather")
        return total.chunk(ctx.communicator.world_size)[ctx.communicator.rank].reshape(ctx.shape), None


def gather(tensor: Any) -> Any:
    """Collect nested tensors from all processes, concatenated along their first dimension.

    Collective: call on every rank.

    Args:
        tensor: nested tensors, of the same structure, shapes and dtypes on every rank. Scalars become vectors.

    Returns:
        On every rank the same structure with all ranks' tensors, without gradients. A single process gets its argument back.

    Raises:
        DistributedOperationException: structure, shapes or dtypes differ between ranks; raised on all of them.
        TypeError: a leaf is no tensor.

    Example:
        >>> gather(torch.tensor([1]))  # with two processes: tensor([1, 1])
        tensor([1])
    """
    return gather_with(comm.current(), tensor)


def gather_object_with(communicator: Communicator, object: Any, ranks: slice = slice(None)) -> Any:
    """Do what `gather_object` does, with a given communicator, and with what some of its ranks give."""
    if communicator.world_size == 1:
        return object
    if not isinstance(object, Iterable) or isinstance(object, (str, bytes)):
        raise TypeError(
            f"gather_object() got {object!r} ({type(object).__name__}); pass a list, such as [{object!r}]."
        )
    values = communicator.gather_object(object)[ranks]
    if any(holds_columns(value) for value in values):
        return _merged("", values, communicator.rank)
    return [element for elements in values for element in elements]


def holds_columns(data: Any) -> bool:
    """Return whether the values of a mapping or tuple are lists or tensors that are gathered one by one."""
    if isinstance(data, tuple):
        columns = all(isinstance(item, (list, torch.Tensor, np.ndarray, Mapping)) for item in data)
        return columns and any(isinstance(item, list) for item in data)
    return isinstance(data, Mapping)


def _is_single(value: Any) -> bool:
    return not isinstance(value, (list, tuple, set, torch.Tensor, np.ndarray, Mapping))


def _merged(path: str, values: Sequence[Any], rank: int) -> Any:
    """Merge the ranks' values at one position of a structure; a single value becomes a tuple with one value per rank."""
    first = values[0]
    if all(isinstance(value, Mapping) for value in values):
        items = {}
        for key in dict.fromkeys(key for value in values for key in value):
            having = [value[key] for value in values if key in value]
            if len(having) < len(values) and not all(_is_single(item) for item in having):
                raise TypeError(
                    f"gather_object() got {key!r}{path} from some ranks only. Pass the same keys on all ranks."
                )
            items[key] = _merged(f" in [{key!r}]{path}", having, rank)
        return like_mapping(first, items)
    if holds_columns(first):
        if any(type(value) is not type(first) or len(value) != len(first) for value in values):
            raise TypeError(f"gather_object() got different tuples{path} from the ranks. Pass equally long ones.")
        columns = enumerate(zip(*values, strict=True))
        return honor_type(first, [_merged(f" in [{index}]{path}", column, rank) for index, column in columns])
    arrays = torch.Tensor if isinstance(first, torch.Tensor) else np.ndarray
    if isinstance(first, arrays) and all(isinstance(value, arrays) for value in values):
        try:
            if arrays is np.ndarray:
                return np.concatenate([np.atleast_1d(value) for value in values])
            return torch.cat([torch.atleast_1d(value).to(values[rank].device) for value in values])
        except (RuntimeError, ValueError) as error:
            raise TypeError(
                f"gather_object() cannot concatenate tensors{path}: {error}. Pass a list of tensors there, one per sample."
            ) from error
    if all(isinstance(value, (list, tuple, set)) for value in values):
        return [element for elements in values for element in elements]
    if not all(map(_is_single, values)):
        kinds = " and ".join(sorted({type(value).__name__ for value in values}))
        raise TypeError(f"gather_object() got a {kinds}{path} from the ranks. Pass the same structure on all ranks.")
    return tuple(values)


def gather_object(object: Any) -> Any:
    """Collect lists of picklable objects from all processes into one list.

    Collective: call on every rank.

    Args:
        object: a list, or another iterable. In a dictionary, or in a tuple that contains lists, each value is collected:
            lists are joined, tensors and arrays are concatenated, and any other value becomes a tuple of one value per rank.

    Returns:
        The elements of all ranks, in the order of the ranks, on every rank. A single process gets its argument back.

    Raises:
        TypeError: the argument is no iterable or a string, structures differ, or tensors cannot be concatenated.

    Example:
        >>> gather_object([{"loss": 0.5}])  # with two processes: one dictionary of each
        [{'loss': 0.5}]
    """
    return gather_object_with(comm.current(), object)


def _filled(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Write a value into a rank's own tensor, unseen by autograd, and return the tensor that has it."""
    if any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)):
        return value  # from `expand`: its elements share memory, so they cannot take different values
    with torch.inference_mode(target.is_inference()):
        target.data.copy_(value)
    return target


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Give all processes the nested tensors of one of them.

    Collective: call on every rank.

    Args:
        tensor: nested tensors, of the same structure, shapes and dtypes on every rank, filled in place if possible.
        from_process: the rank that sends.

    Returns:
        The same structure with the values of `from_process`. The rank's tensors keep their gradient functions.

    Raises:
        DistributedOperationException: structure, shapes or dtypes differ between ranks; raised on all of them.
        TypeError: a leaf is no tensor.

    Example:
        >>> from accelerate.utils import broadcast
        >>> broadcast(torch.tensor([1, 2]))  # those of rank 0, on all ranks
        tensor([1, 2])
    """
    communicator = comm.current()
    if communicator.world_size == 1:
        return tensor
    compare_arguments(communicator, "broadcast", tensor)
    values = communicator.broadcast(tensor, from_process)
    return over_leaves(
        lambda local, value: local if communicator.rank == from_process else _filled(local, value), tensor, values
    )


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Give all processes the picklable objects of one of them.

    Collective: call on every rank.

    Args:
        object_list: a list of the same length on every rank; its elements are replaced in place.
        from_process: whose.

    Returns:
        The same list.

    Example:
        >>> from accelerate.utils import broadcast_object_list
        >>> broadcast_object_list(["run-1"])
        ['run-1']
    """
    communicator = comm.current()
    # Given an empty list, torch fails on one rank, and the others wait.
    if communicator.world_size == 1 or not object_list:
        return object_list
    return communicator.broadcast_object_list(object_list, from_process)


_REDUCTIONS = {"mean": "mean", "sum": "sum", "none": "sum", "max": "max"}


def reduce_with(communicator: Communicator, tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Do what `reduce` does, with a given communicator."""
    if reduction not in _REDUCTIONS:
        raise ValueError(f"Unknown reduction {reduction!r}; choose 'mean', 'sum', 'max' or 'none' (also a sum).")
    scales = scale != 1.0 and storage.process.current.get("backend") == "xla"
    if scale != 1.0 and not scales:
        warnings.warn(
            f"scale={scale} is applied on XLA devices only; multiply the result here.", UserWarning, stacklevel=3
        )
    compare_arguments(communicator, "reduce", tensor)
    # A single process keeps the dtype of integers.
    values = communicator.all_reduce(tensor, _REDUCTIONS[reduction] if communicator.world_size > 1 else "sum")
    parts = communicator.world_size if reduction == "mean" else 1
    results = over_leaves(lambda local, value: _with_gradient(local, value, parts), tensor, values)
    return recursively_apply(lambda result: result * scale, results) if scales else results


def _with_gradient(local: torch.Tensor, value: torch.Tensor, parts: int) -> torch.Tensor:
    """Return a reduced value whose gradient goes only to the rank's own part; backward exchanges nothing."""
    if not (local.requires_grad and torch.is_grad_enabled()):
        return value
    result = local / parts
    result.data.copy_(value)
    return result


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Add up or average nested tensors over all processes.

    Collective: call on every rank.

    Args:
        tensor: nested tensors, of the same structure, shapes and dtypes on every rank. They are not changed.
        reduction: "mean", "sum" or "max"; "none" is a sum as well. The mean of integers is a float tensor.
        scale: factor for the result, on XLA devices only.

    Returns:
        The same structure with new tensors, the results, on every rank. `backward` reaches only the rank's own part: its
        gradient is the result's gradient, divided by the number of processes for a mean.

    Raises:
        DistributedOperationException: structure, shapes or dtypes differ between ranks; raised on all of them.
        TypeError: a leaf is no tensor.
        ValueError: the reduction is unknown.

    Example:
        >>> reduce(torch.tensor([1.0]), reduction="sum")  # with two processes: tensor([2.])
        tensor([1.])
    """
    return reduce_with(comm.current(), tensor, reduction, scale)


def pad_with(
    communicator: Communicator, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
) -> Any:
    """Do what `pad_across_processes` does, with a given communicator."""
    compare_arguments(communicator, "pad_across_processes", tensor)
    tensors: list[torch.Tensor] = []
    structure = outline(tensor, tensors, "pad_across_processes")
    if any(item.is_nested for item in tensors):
        warnings.warn(
            "pad_across_processes leaves torch.nested tensors as they are: their rows differ in size.",
            CannotPadNestedTensorWarning,
            stacklevel=3,
        )
    to_pad = [not item.is_nested and -item.ndim <= dim < item.ndim for item in tensors]
    if communicator.world_size == 1 or not tensors:
        return rebuild(tensor, tensors)
    # One exchange for all tensors. The ranks must agree on which tensors are padded, not on dtypes or sizes.
    sizes = torch.tensor([item.shape[dim] if lengthen else 0 for item, lengthen in zip(tensors, to_pad, strict=True)])
    words = filled(structure, ["nested" if item.is_nested else f"{item.ndim}-dimensional" for item in tensors])
    note = f" for {words} along {dim}"
    longest = communicator.all_reduce(sizes, "max", "pad_across_processes", note).tolist()
    results = [
        padded(item, dim, length, pad_index, pad_first) if lengthen else item
        for item, lengthen, length in zip(tensors, to_pad, longest, strict=True)
    ]
    return rebuild(tensor, results)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Lengthen nested tensors until they are as long as the longest among the processes.

    Collective: call on every rank.

    Args:
        tensor: nested tensors; tensors without dimension `dim` stay as they are.
        dim: which dimension to lengthen.
        pad_index: the value to fill in.
        pad_first: fill in at the beginning.

    Returns:
        The same structure, ready for `gather`.

    Raises:
        DistributedOperationException: structure or numbers of dimensions differ between ranks; raised on all of them.
        TypeError: a leaf is no tensor.

    Warns:
        CannotPadNestedTensorWarning: a tensor is a `torch.nested` one; it stays as it is.

    Example:
        >>> from accelerate.utils import pad_across_processes
        >>> pad_across_processes(torch.ones(1, 3), dim=1).shape  # as long as the longest of all ranks
        torch.Size([1, 3])
    """
    return pad_with(comm.current(), tensor, dim, pad_index, pad_first)


# Precision


def convert_to_fp32(tensor: Any) -> Any:
    """Convert the half-precision tensors (float16, bfloat16) of a nested structure to float32; the rest stays.

    Example:
        >>> convert_to_fp32({"x": torch.ones(1, dtype=torch.bfloat16), "n": torch.ones(1, dtype=torch.int64)})
        {'x': tensor([1.]), 'n': tensor([1])}
    """
    return recursively_apply(
        torch.Tensor.float,
        tensor,
        test_type=lambda item: isinstance(item, torch.Tensor) and item.dtype in (torch.float16, torch.bfloat16),
    )
