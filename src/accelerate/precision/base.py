"""The precision table: what each ``mixed_precision`` value means for forward, weights and loss scaling."""

import sys
import warnings
from dataclasses import dataclass

import torch

from accelerate.config.enums import PrecisionType


@dataclass(frozen=True)
class Precision:
    """What one ``mixed_precision`` value asks for.

    Attributes:
        name: The value as the user writes it.
        autocast_dtype: The dtype that forward passes are autocast to; None when they are not.
        scales_loss: Whether gradients can underflow, so that the loss is scaled.
        needs_engine: Whether an fp8 library has to convert the model.
    """

    name: str
    autocast_dtype: torch.dtype | None = None
    scales_loss: bool = False
    needs_engine: bool = False


_TABLE = {
    "no": Precision("no"),
    "bf16": Precision("bf16", torch.bfloat16),
    "fp16": Precision("fp16", torch.float16, scales_loss=True),
    # Outside the converted layers an fp8 run computes in bfloat16.
    "fp8": Precision("fp8", torch.bfloat16, needs_engine=True),
}


def precision(name: str | PrecisionType) -> Precision:
    """Return the table row of a ``mixed_precision`` value.

    Args:
        name: One of ``"no"``, ``"fp16"``, ``"bf16"``, ``"fp8"``.

    Raises:
        ValueError: The value is none of them.
    """
    key = getattr(name, "value", name)
    if key not in _TABLE:
        raise ValueError(f"mixed_precision={name!r} is unknown. Choose one of {list(_TABLE)}.")
    return _TABLE[key]


def warn_user(message: str) -> None:
    """Issue a UserWarning that points at the first line outside this package.

    Args:
        message: What happened, what it means, and what to do.
    """
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "accelerate":
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=depth)
