"""``downcast_bf16``: on TPUs, float32 rather than bfloat16 in the place of float64, done by torch_xla."""

import os

from accelerate.precision.base import warn_user
from accelerate.utils.environment import parse_flag_from_env

# torch_xla stores float32 and float64 as bfloat16 under the first; under the second float32 as bfloat16, float64 as float32.
USE, DOWNCAST = "XLA_USE_BF16", "XLA_DOWNCAST_BF16"
FLAG = "ACCELERATE_DOWNCAST_BF16"


def settle_downcast(device_type: str, mixed_precision: str) -> None:
    """Give torch_xla what ACCELERATE_DOWNCAST_BF16 asks for, or say that it has no effect. All ranks.

    ``accelerate launch --downcast_bf16`` sets torch_xla's own variable before the worker starts; this is for a worker that
    is started by hand.

    Args:
        device_type: What this rank computes on.
        mixed_precision: The precision in force.
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
