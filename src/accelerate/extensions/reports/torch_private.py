"""torch's private names that this extension uses, of modules, modes and operators; see `accelerate.runtime.torch_private`."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.runtime.torch_private import shard_groups


@contextlib.contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Let attributes, such as functions of modules, have other values for a block."""
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    try:
        for place, name, value in places:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in reversed(before):
            setattr(place, name, value)


def is_distributed(kind: type) -> bool:
    """Return whether a class of tensors is that of DTensors, without an import of it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def group_named(name: str) -> Any:
    """Return the process group of a name."""
    return dist.distributed_c10d._resolve_process_group(name)


def output_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that `fully_shard` casts the outputs of a module to, or None."""
    state = getattr(module, "_get_fsdp_state", None)
    return None if state is None else getattr(getattr(state(), "_mp_policy", None), "output_dtype", None)


def wrap_exchanges(model: nn.Module, around: Callable[[Callable], Callable]) -> None:
    """Put something around the methods of `fully_shard` that wait for gathered parameters and reduce gradients."""
    for group in shard_groups(model):
        for name in ("wait_for_unshard", "post_backward"):
            if hasattr(group, name):
                setattr(group, name, around(getattr(group, name)))


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether torch.compile has replaced the call of a module, or its forward, without a module around it."""
    forward = module.__dict__.get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def attention_operators(ending: str) -> list[Any]:
    """Return this torch's attention operators with such an ending of the name."""
    kernels = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    names = (f"_scaled_dot_product_{kernel}{ending}" for kernel in kernels)
    return [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]


def grouped_products() -> list[Any]:
    """Return the operator that multiplies each group of rows by its own matrix, if this torch has it."""
    return [torch.ops.aten._grouped_mm] if hasattr(torch.ops.aten, "_grouped_mm") else []


def overload_packet(operation: Any) -> Any:
    """Return the operation that an overload belongs to, as tables of operations name it."""
    return operation._overloadpacket
