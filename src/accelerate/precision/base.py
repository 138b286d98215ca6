"""The precision table: what each ``mixed_precision`` value means for forward, weights and loss scaling."""

import os
from dataclasses import dataclass

import torch

from accelerate._warn import warn_user
from accelerate.config.enums import PrecisionType
from accelerate.utils.environment import parse_flag_from_env


@dataclass(frozen=True)
class Precision:
    """What one ``mixed_precision`` value asks for.

    Attributes:
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
    """Return the table row of a ``mixed_precision`` value; ValueError: there is none."""
    key = getattr(name, "value", name)
    if key not in _TABLE:
        raise ValueError(f"mixed_precision={name!r} is unknown. Choose one of {list(_TABLE)}.")
    return _TABLE[key]


# torch_xla stores float32 and float64 as bfloat16 under the first; under the second float32 as bfloat16, float64 as float32.
USE, DOWNCAST = "XLA_USE_BF16", "XLA_DOWNCAST_BF16"
FLAG = "ACCELERATE_DOWNCAST_BF16"


def apply_downcast(device_type: str, mixed_precision: str) -> None:
    """Give torch_xla what ACCELERATE_DOWNCAST_BF16 asks for, or warn that it has no effect. All ranks.

    For a worker started by hand: ``accelerate launch --downcast_bf16`` sets torch_xla's own variable before the worker
    starts.
    """
    if not parse_flag_from_env(FLAG):
        return
    if device_type != "xla" or mixed_precision != "bf16":
        warn_user(
            f"{FLAG} has no effect: it is for mixed_precision='bf16' on TPUs, and this run has "
            f"mixed_precision={mixed_precision!r} on {device_type!r}."
        )
        return
    os.environ.pop(USE, None)
    os.environ[DOWNCAST] = "1"
