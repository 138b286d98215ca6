"""Floating-point numbers that torch_xla stores in fewer bits."""

import os

from accelerate.base._warn import warn_user
from accelerate.extensions.xla import DOWNCAST_FLAG

# torch_xla stores float32 and float64 as bfloat16 under the first; under the second float32 as bfloat16, float64 as float32.
USE, DOWNCAST = "XLA_USE_BF16", "XLA_DOWNCAST_BF16"


def apply_downcast(device_type: str, mixed_precision: str) -> None:
    """Set the variable of torch_xla that `DOWNCAST_FLAG` stands for, or warn that it has no effect.

    It is for a worker started manually: ``accelerate launch --downcast_bf16`` sets torch_xla's own variable before the worker
    starts.

    Collective: call on every rank.
    """
    if device_type != "xla" or mixed_precision != "bf16":
        warn_user(
            f"{DOWNCAST_FLAG} has no effect: it is for mixed_precision='bf16' on TPUs, and this run has "
            f"mixed_precision={mixed_precision!r} on {device_type!r}."
        )
        return
    os.environ.pop(USE, None)
    os.environ[DOWNCAST] = "1"
