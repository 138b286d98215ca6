"""Freeing memory, recognising that it ran out, and finding a batch size that fits."""

import functools
import gc
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from accelerate.devices import probe
from accelerate.runtime import storage

logger = logging.getLogger(__name__)

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
    """Give the device memory that torch holds in reserve back to the driver. Any rank, alone.

    `garbage_collection` collects Python's garbage first, so that tensors in reference cycles count as free.
    """
    if garbage_collection:
        gc.collect()
    probe.detect().empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Drop references and free device memory. Any rank, alone.

    Args:
        *objects: What to let go of. Assign the result to the same names, so that no reference is left.

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
    """Say whether an exception means that memory ran out, so that a smaller batch may work."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    if not isinstance(exception, RuntimeError):
        return False
    text = str(exception).lower()
    return any(sign in text for sign in OUT_OF_MEMORY_TEXTS)


def find_executable_batch_size(
    function: Callable | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable:
    """Call a function with smaller and smaller batch sizes until it does not run out of memory. A decorator.

    The function receives the batch size as its first argument; callers leave it out. A later call starts with the size
    that worked. What the function built before it failed must be built anew in each try, so put that inside it.

    With several processes each rank decides for itself: a rank that runs out of memory leaves the others waiting in
    their collectives, and nothing here can call them out of it. So use it where all ranks run out of memory together,
    or, to search safely, run the function in one process first. A warning is logged when a rank retries.

    Args:
        function: The function to decorate; None when the decorator is used with arguments.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Takes nothing and returns the next size. By default the last size times 0.9, rounded down.

    Returns:
        The decorated function, or a decorator.

    Raises:
        RuntimeError: No size down to one fits.
        TypeError: The decorated function is called with the batch size, or cannot receive one.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=16)
        ... def train(batch_size, rate):
        ...     if batch_size > 12:
        ...         raise RuntimeError("CUDA out of memory.")
        ...     return batch_size
        >>> train(0.1)
        12
    """
    if function is None:
        options = {"starting_batch_size": starting_batch_size, "reduce_batch_size_fn": reduce_batch_size_fn}
        return functools.partial(find_executable_batch_size, **options)
    name = getattr(function, "__name__", repr(function))
    signature = inspect.signature(function)
    batch_size = starting_batch_size

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        _check_call(name, signature, args, kwargs)
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                failed, reason = batch_size, str(error).partition("\n")[0]
            # Outside the handler: there the traceback still holds the frames, and with them the tensors, of the try.
            batch_size = reduce_batch_size_fn() if reduce_batch_size_fn is not None else int(failed * 0.9)
            clear_device_cache(garbage_collection=True)
            if batch_size > 0:
                logger.warning("%s Retrying `%s` with batch size %d.%s", reason, name, batch_size, _alone())
        raise RuntimeError(
            "No executable batch size found, reached zero. "
            f"`{name}` ran out of memory even with the smallest batch size; free memory, or use a smaller model."
        )

    return search


def _check_call(name: str, signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse a call that leaves no place for the batch size, before anything runs; other mistakes are Python's to report."""
    try:
        signature.bind_partial(0, *args)
    except TypeError as error:
        rest = [*map(repr, args[1:]), *(f"{key}={value!r}" for key, value in kwargs.items())]
        raise TypeError(
            f"Batch size was passed into `{name}`, or `{name}` has no parameter for it ({error}). The decorator passes "
            f"the batch size as the first argument and callers leave it out: `{name}({', '.join(rest)})`."
        ) from error


def _alone() -> str:
    process = storage.process.current
    if process.get("num_processes", 1) == 1:
        return ""
    return f" Rank {process['process_index']} retries alone: the other ranks wait for it in their collectives."
