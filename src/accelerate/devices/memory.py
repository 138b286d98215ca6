"""Freeing device memory, and recognising that memory ran out."""

import gc
from typing import Any

import torch

from accelerate.devices import table

# How each device says that memory ran out, in lower case. torch has a type for it, but not all devices raise it.
OUT_OF_MEMORY_TEXTS = (
    "out of memory",  # CUDA, ROCm, XPU, NPU, MLU, MPS ("MPS backend out of memory")
    "can't allocate memory",  # DefaultCPUAllocator
    "not enough memory",  # DefaultCPUAllocator on Windows
    "cudnn error: cudnn_status_not_supported",  # what cuDNN says when its workspace does not fit
    "cublas_status_alloc_failed",
    "pt_devmem allocation failed",  # HPU
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the device memory that torch holds in reserve back to the driver.

    `garbage_collection` collects Python's garbage first, so that tensors in reference cycles count as free.

    Not a collective.

    Example:
        >>> from accelerate.utils.memory import clear_device_cache
        >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    table.detect().empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Drop references and free device memory.

    Not a collective.

    Args:
        *objects: The objects to release. Assign the result to the same names, so that no reference remains.

    Returns:
        One None for each object.

    Example:
        >>> a, b = torch.ones(1000, 1000), torch.ones(1000, 1000)
        >>> a, b = release_memory(a, b)
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an exception means that memory ran out, so that a smaller batch may work.

    Example:
        >>> from accelerate.utils.memory import should_reduce_batch_size
        >>> should_reduce_batch_size(RuntimeError("CUDA out of memory."))
        True
    """
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    if not isinstance(exception, RuntimeError):
        return False
    text = str(exception).lower()
    return any(sign in text for sign in OUT_OF_MEMORY_TEXTS)
