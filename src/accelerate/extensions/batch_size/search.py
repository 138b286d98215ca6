"""Finding a batch size that fits into memory, by all ranks together."""

import functools
import inspect
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accelerate.checkpoint.ranks import Group, Ranks, default_store
from accelerate.comm.torch_dist import operations_started
from accelerate.config.enums import DistributedType
from accelerate.config.strategies import traits_of
from accelerate.data import resume
from accelerate.devices.memory import clear_device_cache, should_reduce_batch_size
from accelerate.runtime import generators, storage

if TYPE_CHECKING:
    from accelerate.training.run import TrainingRun

logger = logging.getLogger("accelerate.utils.memory")  # the public path

# An Accelerator's lists that a failed try may have added to.
_REGISTRIES = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    accelerator: "TrainingRun | None" = None,
    keep_global_batch: bool = False,
    together: bool = True,
) -> Callable[..., Any]:
    """Call a function with smaller and smaller batch sizes until it does not run out of memory. A decorator.

    The function receives the batch size as its first argument; callers omit it. A later call starts with the size that
    worked. Build the objects of a try inside the function, so that each try builds them again.

    Several processes search together. If the try ends on all ranks, and some ran out of memory, all try again with the smallest
    size that any of them needs. The random generators return to their state at the call. The call returns on each rank once
    the function has returned on all. If only one rank runs out of memory, and the others wait for it in a collective, it raises
    an error.

    Collective: call on every rank.

    Args:
        function: The function to decorate; None when the decorator is used with arguments.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Takes nothing and returns the next size; every rank calls it before each new try. By default
            the last size times 0.9, or half of it with `keep_global_batch`, rounded down.
        accelerator: The Accelerator that the function trains with. Each new try restores the positions of loaders that were
            prepared before the call, and releases the objects that the failed try prepared.
        keep_global_batch: Raise `accelerator.gradient_accumulation_steps` so that an optimizer step takes as many samples
            as with the first size, or up to a micro-batch more if that does not divide.
        together: False lets each rank search separately, for functions without collectives that not all ranks call.

    Returns:
        The decorated function, or a decorator.

    Raises:
        CollectiveMisuse: Another rank will not call the function, or waits in it for this one, which ran out of memory.
        RuntimeError: No size down to one fits, or the ranks ran out of memory at different places; on all ranks.
        TypeError: The decorated function is called with the batch size, or cannot receive one.
        ValueError: `keep_global_batch` without `accelerator`.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=16)
        ... def train(batch_size, rate):
        ...     if batch_size > 12:
        ...         raise RuntimeError("CUDA out of memory.")
        ...     return batch_size
        >>> train(0.1)
        12
    """
    options: dict[str, Any] = {
        "accelerator": accelerator,
        "keep_global_batch": keep_global_batch,
        "together": together,
    }
    if keep_global_batch and accelerator is None:
        raise ValueError("keep_global_batch=True needs `accelerator`, whose gradient_accumulation_steps it raises.")
    if function is None:
        options |= {"starting_batch_size": starting_batch_size, "reduce_batch_size_fn": reduce_batch_size_fn}
        return functools.partial(find_executable_batch_size, **options)
    name = getattr(function, "__name__", repr(function))
    signature = inspect.signature(function)
    batch_size = starting_batch_size
    factor = 0.5 if keep_global_batch else 0.9
    adjusted = accelerator if keep_global_batch else None
    reduced = reduce_batch_size_fn or (lambda: int(batch_size * factor))

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        _check_call(name, signature, args, kwargs)
        clear_device_cache(garbage_collection=True)
        put_back = _kept(accelerator) if accelerator is not None or (together and _store()) else lambda: None
        samples = batch_size * adjusted.gradient_accumulation_steps if adjusted is not None else 0
        while batch_size > 0:
            store, result, failed = _store() if together else None, None, ""
            try:
                result = function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                failed = str(error).partition("\n")[0] or type(error).__name__
            # Outside the handler: there the traceback still holds the frames, and with them the tensors, of the try.
            size = _next_size(name, store, bool(failed), reduced)
            if size is None:
                return result
            result, batch_size = None, size
            put_back()
            clear_device_cache(garbage_collection=True)
            if batch_size > 0:
                if adjusted is not None:
                    adjusted.gradient_accumulation_steps = math.ceil(samples / batch_size)
                failed = failed or "Another rank ran out of memory."
                logger.warning("%s Retrying `%s` with batch size %d.%s", failed, name, batch_size, _alone(store))
        raise RuntimeError(
            "No executable batch size found, reached zero. "
            f"`{name}` ran out of memory even with the smallest batch size; free memory, or use a smaller model."
        )

    return search


# -- several ranks -------------------------------------------------------------------------------------------------


def _store() -> Any | None:
    """Return the store in which the ranks exchange sizes; None for one rank, and with an engine that keeps its process group."""
    kind = storage.process.current.get("distributed_type", DistributedType.NO)
    return None if traits_of(kind).own_groups else default_store()


def _next_size(name: str, store: Any | None, failed: bool, reduced: Callable[[], int]) -> int | None:
    """Return the smallest size that any rank needs; None if none has failed. All ranks, once their try has ended."""
    if store is None or not dist.is_initialized():  # the function has ended it, with `end_training`
        return reduced() if failed else None
    local_rank = storage.process.current.get("local_process_index", 0)
    group = Group(dist.get_rank(), dist.get_world_size(), local_rank, False, False)
    ranks = Ranks(group, store)
    ranks.agree("find_executable_batch_size", name)
    size = ranks.smallest(reduced()) if ranks.any(failed) else None
    started = sum(operations_started().values())
    same_size = size is None or ranks.smallest(started) == -ranks.smallest(-started)
    ranks.leave()
    if not same_size:
        raise RuntimeError(
            f"`{name}` ran out of memory where the ranks had started different numbers of collectives (this one {started}), so the "
            f"next ones would not fit together. Start the program again with starting_batch_size={size}."
        )
    return size


def _kept(accelerator: "TrainingRun | None") -> Callable[[], None]:
    """Return a function that restores random generators, prepared loaders and registered objects to their present state."""
    device = storage.process.current.get("device") or torch.device("cpu")
    states = generators.collect(device)
    put_registered_back = None if accelerator is None else _registered(accelerator)

    def put_back() -> None:
        if put_registered_back is not None:
            put_registered_back()
        generators.restore(states, device, "a failed try")

    return put_back


def _registered(accelerator: "TrainingRun") -> Callable[[], None]:
    """Return what lets an Accelerator go of all that it is given from now on, and of the accumulation step that is open then."""
    from accelerate.training import gradients  # imported wherever an Accelerator exists

    prepared, step = accelerator.prepared, accelerator.step
    registries = {name: list(getattr(accelerator, name)) for name in _REGISTRIES}
    engines = list(prepared.engines)
    loaders = [resume.kept(loader) for loader in accelerator._dataloaders]
    attached = accelerator.extensions.attached

    def put_back() -> None:
        for extension in [extension for extension in accelerator.extensions.attached if extension not in attached]:
            extension.released()
        vars(accelerator).update({name: list(former) for name, former in registries.items()})
        prepared.engines[:] = engines
        for put_loader_back in loaders:
            put_loader_back()
        gradients.reset(accelerator)
        accelerator.step = step

    return put_back


def _check_call(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call that leaves no place for the batch size, before anything runs; other mistakes are Python's to report."""
    try:
        signature.bind_partial(0, *args)
    except TypeError as error:
        rest = [*map(repr, args[1:]), *(f"{key}={value!r}" for key, value in kwargs.items())]
        raise TypeError(
            f"Batch size was passed into `{name}`, or `{name}` has no parameter for it ({error}). The decorator passes "
            f"the batch size as the first argument and callers omit it: `{name}({', '.join(rest)})`."
        ) from error


def _alone(store: Any | None) -> str:
    process = storage.process.current
    if store is not None or process.get("num_processes", 1) == 1:
        return ""
    return f" Rank {process['process_index']} retries without the others: they wait for it in their collectives."
