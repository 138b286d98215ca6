"""Master weights: the float32 copy that a low-precision run must update, made before a strategy shards the model."""

from dataclasses import dataclass

import torch
from torch import nn

from accelerate.base._warn import warn_user
from accelerate.precision import amp
from accelerate.runtime import storage
from accelerate.runtime.torch_private import local_part, set_data

# A library decides in which dtype its 8-bit weights are updated.
LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Upcast:
    """The result of ``upcast``, as ``model._accelerate_upcast``: former dtypes by name, bytes added on this rank."""

    before: dict[str, torch.dtype]
    added: int


def upcast(model: nn.Module) -> int:
    """Turn a model's trainable 16-bit parameters into float32 in place; return the bytes that this rank adds.

    A step is often smaller than the resolution of bfloat16 (one part in 256). A strategy that casts for each forward keeps
    these as master weights (https://arxiv.org/abs/1710.03740). The Parameter objects stay, and with them ties, hooks
    and optimizers. Call it before the model is sharded; DTensors and meta tensors are also accepted. The main process warns.

    Not a collective.
    """
    amp.remember(model)
    before: dict[str, torch.dtype] = {}
    added = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in LOW:
            before[name] = parameter.dtype
            added += local_part(parameter).numel() * (torch.float32.itemsize - parameter.dtype.itemsize)
            _change_to_float32(parameter)
    if not before:
        return 0
    earlier = getattr(model, "_accelerate_upcast", None)
    model._accelerate_upcast = Upcast({**before, **(earlier.before if earlier else {})}, added)  # type: ignore[assignment]
    if not storage.process.current.get("process_index", 0):
        warn_user(
            f"{len(before)} trainable parameters of {type(model).__name__} were loaded in "
            f"{' and '.join(sorted({short(kind) for kind in before.values()}))} and are kept in float32 from now on "
            f"(+{size(added)} on each rank before sharding), because mixed precision trains a float32 copy. "
            "To train the low-precision weights themselves, use mixed_precision='no'."
        )
    return added


def upcast_frozen(model: nn.Module) -> None:
    """Let frozen 16-bit parameters follow into float32, where a strategy wants one dtype in a unit."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dtype in LOW:
            _change_to_float32(parameter)


def _change_to_float32(parameter: nn.Parameter) -> None:
    gradient, parameter.grad = parameter.grad, None  # torch refuses data of another dtype than the gradient's
    set_data(parameter, parameter.detach().float())
    if gradient is not None:
        parameter.grad = gradient.float()


def size(count: int) -> str:
    """Return a number of bytes for reading, such as ``"1.5 GiB"``."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module."""
    return str(dtype).removeprefix("torch.")
