"""Environment variables that had an effect in an earlier version, and what replaces them."""

import os

REMOVED = {
    "ACCELERATE_CHECKPOINT_READERS": "Every rank reads the checkpoint",
    "ACCELERATE_REPLAY_EVERY": "Use ACCELERATE_CHECK_EVERY, which compares replicas",
    "ACCELERATE_NUMA_AFFINITY": "Use --enable_cpu_affinity, or `torchrun --numa-binding`",
}


def refuse_removed_variables() -> None:
    """Raise ValueError if a removed variable is set: it would have no effect."""
    for name, replacement in REMOVED.items():
        if (value := os.environ.get(name, "0")) not in ("", "0"):
            raise ValueError(
                f"{name}={value!r} has no effect, because this setting was removed. {replacement}. Unset the variable."
            )
