"""Master weights: the float32 copy that a low-precision run must update, made before a strategy shards the model."""

from dataclasses import dataclass

import torch
from torch import nn

from accelerate.precision.base import warn_user
from accelerate.runtime import storage

# 8-bit weights are a library's own: it decides what they are updated in.
LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Upcast:
    """What ``upcast`` did to a model, kept on it as ``_accelerate_upcast`` for the precision report.

    Attributes:
        before: The dtype that each changed parameter had, by its name in the model.
        dtype: The dtype that they have now.
        added: The memory that this costs on this rank, in bytes.
    """

    before: dict[str, torch.dtype]
    dtype: torch.dtype
    added: int


def upcast(model: nn.Module, dtype: torch.dtype = torch.float32) -> int:
    """Turn the trainable 16-bit parameters of a model into a wider dtype, in place, so that an optimizer updates these.

    A step of an optimizer is often smaller than what bfloat16 resolves (one part in 256) and is then lost; a strategy
    that computes in low precision casts for each forward, and keeps these as the master weights. The Parameter
    objects stay, and with them ties, hooks and the optimizers that hold them. Frozen parameters and buffers keep
    their dtype. Any rank, alone; the warning comes from the main process.

    Args:
        model: The model as the user gave it, before it is sharded. DTensors and meta tensors are taken too.
        dtype: A floating dtype wider than 16 bits.

    Returns:
        How many bytes this rank's memory grew by; 0 when nothing was to change.

    Raises:
        ValueError: ``dtype`` is not a floating dtype of more than 16 bits.

    Example:
        >>> import warnings
        >>> model = nn.Linear(4, 4).to(torch.bfloat16)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     upcast(model)
        40
        >>> model.weight.dtype
        torch.float32

    Source:
        https://arxiv.org/abs/1710.03740
    """
    if not dtype.is_floating_point or dtype.itemsize <= 2:
        raise ValueError(
            f"upcast() got dtype={dtype}, which is no wider than what it replaces. Pass torch.float32 or torch.float64."
        )
    remember(model)
    before: dict[str, torch.dtype] = {}
    added = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in LOW:
            before[name] = parameter.dtype
            local = local_part(parameter)
            added += local.numel() * (dtype.itemsize - parameter.dtype.itemsize)
            _change(parameter, dtype)
    if not before:
        return 0
    earlier = getattr(model, "_accelerate_upcast", None)
    model._accelerate_upcast = Upcast({**before, **(earlier.before if earlier else {})}, dtype, added)  # type: ignore[assignment]
    if not storage.process.current.get("process_index", 0):
        warn_user(
            f"{len(before)} trainable parameters of {type(model).__name__} were loaded in "
            f"{' and '.join(sorted({short(kind) for kind in before.values()}))} and are kept in {short(dtype)} from now on "
            f"(+{size(added)} on each rank before sharding), because mixed precision trains a {short(dtype)} copy. "
            "To train the low-precision weights themselves, use mixed_precision='no'."
        )
    return added


def remember(model: nn.Module) -> None:
    """Note in which dtypes a model came to ``prepare``, once, for the precision report. Any rank, alone.

    Args:
        model: The model as the user gave it; its ``_accelerate_loaded`` then has the dtype of each parameter and buffer.
    """
    if "_accelerate_loaded" not in model.__dict__:
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        model._accelerate_loaded = {name: tensor.dtype for name, tensor in tensors}  # type: ignore[assignment]


def _change(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    gradient, parameter.grad = parameter.grad, None  # torch refuses data of another dtype than the gradient's
    wider = parameter.detach().to(dtype)
    parameter.data = wider
    if hasattr(wider, "_local_tensor"):
        # Setting `data` of a DTensor changes the outer tensor alone; what it wraps and describes is in these two.
        parameter._local_tensor, parameter._spec = wider._local_tensor, wider._spec  # type: ignore[attr-defined]
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: the local shard of a DTensor, else the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def size(count: int) -> str:
    """Return a number of bytes for reading, in binary units.

    Example:
        >>> size(3 * 2**29)
        '1.5 GiB'
    """
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module.

    Example:
        >>> short(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
