"""Operations on nested tensors, and between processes, that programs import from `accelerate.utils.operations`."""

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from accelerate import comm
from accelerate.base.nested import padded, recursively_apply, shape_of
from accelerate.comm.base import Communicator, DistributedOperationException
from accelerate.comm.operations import (
    broadcast,
    broadcast_object_list,
    compare_arguments,
    convert_to_fp32,
    gather,
    gather_object,
)
from accelerate.runtime import storage

# Element types as numbers, so that one process can announce the type of the next tensor to the others.
_DTYPES = ["float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool"]
TENSOR_TYPE_TO_INT = {getattr(torch, name): code for code, name in enumerate(_DTYPES, 1)}
TENSOR_INT_TO_DTYPE = {code: dtype for dtype, code in TENSOR_TYPE_TO_INT.items()}


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


@dataclass
class TensorInformation:
    """The shape and dtype of a tensor, which one process sends ahead so that others can make room for it.

    Args:
        shape: its size.
        dtype: its element type.
    """

    __module__ = "accelerate.utils.dataclasses"  # the path in pickles

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether the argument is a `TensorInformation`.

    Example:
        >>> from accelerate.utils import get_data_structure, is_tensor_information
        >>> is_tensor_information(get_data_structure(torch.ones(1)))
        True
    """
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """Replace each tensor of a nested structure by its `TensorInformation`.

    Example:
        >>> from accelerate.utils import get_data_structure
        >>> get_data_structure({"ids": torch.ones(2, 3)})
        {'ids': TensorInformation(shape=torch.Size([2, 3]), dtype=torch.float32)}
    """
    return recursively_apply(lambda tensor: TensorInformation(shape=shape_of(tensor), dtype=tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Replace each tensor of a nested structure by its shape, as a list."""
    return recursively_apply(lambda tensor: list(shape_of(tensor)), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Replace each `TensorInformation` of a nested structure by a tensor with unspecified content.

    Example:
        >>> from accelerate.utils import get_data_structure, initialize_tensors
        >>> initialize_tensors(get_data_structure([torch.ones(2, 3)]))[0].shape  # of undefined values
        torch.Size([2, 3])
    """

    def empty_tensor(info: TensorInformation) -> torch.Tensor:
        return torch.empty(*info.shape, dtype=info.dtype)

    return recursively_apply(empty_tensor, data_structure, test_type=is_tensor_information)


def listify(data: Any) -> Any:
    """Replace each tensor of a nested structure by numbers, in nested lists.

    Example:
        >>> from accelerate.utils import listify
        >>> listify({"loss": torch.tensor([0.5, 1.0])})
        {'loss': [0.5, 1.0]}
    """
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

    Example:
        >>> from accelerate.utils import slice_tensors
        >>> slice_tensors({"ids": torch.arange(6)}, slice(0, 2))
        {'ids': tensor([0, 1])}
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Lengthen nested tensors with zeros until they can be cut into equal pieces.

    Not a collective.

    Args:
        tensor: nested tensors.
        batch_size: their size along `dim`.
        num_processes: into how many pieces.
        dim: along which dimension.

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


# Names of 1.15.0 for the same operations.
_gpu_gather = _tpu_gather = gather


_gpu_gather_object = _neuron_gather_object = gather_object


_neuron_broadcast_object_list = broadcast_object_list


class ConvertOutputsToFp32:
    """Calls a model's forward and converts half-precision tensors in its result to float32.

    `__wrapped__` is the original. Pickling fails on purpose: it would freeze mixed precision into the model.

    Args:
        model_forward: the function to wrap.
    """

    __module__ = "accelerate.utils.operations"  # the path in pickles

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        raise pickle.PicklingError(
            "A model prepared for mixed precision cannot be pickled. Pickle `accelerator.unwrap_model(model, "
            "keep_fp32_wrapper=False)` instead."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's forward so that half-precision tensors in its result become float32.

    Args:
        model_forward: the function to wrap.

    Returns:
        A plain function, which keeps signature probes and `torch.compile` at ease; its `__wrapped__` is a
        `ConvertOutputsToFp32`, whose `__wrapped__` is the original.

    Example:
        >>> from accelerate.utils import convert_outputs_to_fp32
        >>> convert_outputs_to_fp32(lambda: torch.ones(1, dtype=torch.float16))().dtype
        torch.float32
    """
    converter = ConvertOutputsToFp32(model_forward)

    @functools.wraps(converter)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return converter(*args, **kwargs)

    forward.__wrapped__ = converter
    return forward


@contextlib.contextmanager
def GatheredParameters(
    params: Iterable[torch.nn.Parameter] | torch.nn.Parameter | None,
    modifier_rank: int | None = None,
    fwd_module: torch.nn.Module | None = None,
    enabled: bool = True,
) -> Any:
    """Gather parameters that DeepSpeed ZeRO stage 3 has sharded inside a `with` block; do nothing otherwise.

    Collective under ZeRO stage 3: enter on every rank.

    Args:
        params: the parameters; None means no parameters.
        modifier_rank: the rank whose changes are kept; None discards changes.
        fwd_module: the module that the parameters belong to.
        enabled: False makes the block do nothing.

    Source: https://deepspeed.readthedocs.io/en/latest/zero3.html#deepspeed.zero.GatheredParameters
    """
    if isinstance(params, torch.nn.Parameter):
        params = [params]
    parameters = [] if params is None else list(params)
    if not (enabled and any(hasattr(parameter, "ds_id") for parameter in parameters)):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(
        parameters, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled
    ):
        yield
