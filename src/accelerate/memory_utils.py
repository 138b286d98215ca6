"""The old home of ``accelerate.utils.memory``, kept for programs that import it."""

import warnings

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.devices.memory": "clear_device_cache release_memory should_reduce_batch_size",
    "accelerate.extensions.batch_size.search": "find_executable_batch_size",
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])

warnings.warn(
    "accelerate.memory_utils has moved: import find_executable_batch_size from accelerate, and the rest from "
    "accelerate.utils.memory.",
    FutureWarning,
    stacklevel=2,
)
