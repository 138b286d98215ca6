"""Freeing memory, and finding a batch size that fits. The public path of `accelerate.devices.memory` and `accelerate.extensions.batch_size.search`."""

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.devices.memory": "OUT_OF_MEMORY_TEXTS clear_device_cache release_memory should_reduce_batch_size",
    "accelerate.extensions.batch_size.search": "find_executable_batch_size",
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
