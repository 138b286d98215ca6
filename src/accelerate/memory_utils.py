"""The old home of ``accelerate.utils.memory``, kept for programs that import it."""

import warnings

from accelerate.devices.memory import clear_device_cache, release_memory, should_reduce_batch_size
from accelerate.training.batch_size import find_executable_batch_size

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]

warnings.warn(
    "accelerate.memory_utils has moved: import find_executable_batch_size from accelerate, and the rest from "
    "accelerate.utils.memory.",
    FutureWarning,
    stacklevel=2,
)
