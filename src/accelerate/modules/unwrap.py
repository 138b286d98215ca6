"""Taking a model out of what training put around it: parallel wrappers, compilation, a replaced forward."""

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from accelerate.modules.compile import ORIGINAL, is_compiled_module

# Attribute of a module in which mixed precision keeps what a pickle needs of its forward.
AUTOCAST = "_accelerate_autocast"

# Module path and class of each wrapper that keeps the model under `.module`. They are looked up only among what is
# imported: a class that nobody imported wraps nothing, and importing it (DeepSpeed, say) would take seconds.
PARALLEL_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine"),
    ("torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel", "XlaFullyShardedDataParallel"),
)


def _loaded_wrappers() -> tuple[type, ...]:
    found = [getattr(sys.modules.get(path), name, None) for path, name in PARALLEL_WRAPPERS]
    return tuple([kind for kind in found if isinstance(kind, type)])


def is_parallel_wrapper(module: nn.Module) -> bool:
    """Say whether a module is a wrapper for parallel training around another one (DDP, FSDP1, a DeepSpeed engine).

    Args:
        module: Any module.
    """
    return isinstance(module, _loaded_wrappers())


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the user's model out of the wrappers that training put around it; the model itself when there are none.

    Any rank may call it alone.

    Args:
        model: A model, wrapped or not.
        keep_fp32_wrapper: Keep the forward that mixed precision put in place (autocast, float32 outputs). False gives
            the module its own forward back, in place.
        keep_torch_compile: Return the model compiled, where it was; False returns the module that was compiled.
        recursive: Also take the wrappers off the model's submodules, in place.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 2)
        >>> extract_model_from_parallel(torch.nn.DataParallel(net)) is net
        True
    """
    wrappers = _loaded_wrappers()
    inner, compiled = _peeled(model, wrappers)
    if recursive:
        _unwrap_children(inner, wrappers)
    if not keep_fp32_wrapper:
        restore_forward(inner)
    if not keep_torch_compile:
        original = inner.__dict__.get(ORIGINAL)
        return inner if original is None else original
    return _compiled_like(compiled, inner)


def _peeled(module: nn.Module, wrappers: tuple[type, ...]) -> tuple[nn.Module, Any]:
    """The module inside all wrappers and compiled ones, and the innermost of the compiled ones."""
    compiled = None
    while True:
        if isinstance(module, wrappers):
            module = module.module
        elif is_compiled_module(module):
            compiled, module = module, module._orig_mod
        else:
            return module, compiled


def _compiled_like(compiled: Any, inner: nn.Module) -> nn.Module:
    """The inner module compiled as it was together with its wrappers; itself where nothing was compiled."""
    if compiled is None:
        return inner
    if compiled._orig_mod is inner:
        return compiled
    # A parallel wrapper was compiled together with the model. The wrapper in use must stay what it is, so the inner
    # module gets a compiled module of its own, with the same compiler context.
    return type(compiled)(inner, compiled.dynamo_ctx)


def _unwrap_children(module: nn.Module, wrappers: tuple[type, ...]) -> None:
    for name, child in module._modules.items():
        if child is not None:
            inner, compiled = _peeled(child, wrappers)
            _unwrap_children(inner, wrappers)
            module._modules[name] = _compiled_like(compiled, inner)


def restore_forward(module: nn.Module) -> None:
    """Undo the forward that mixed precision put on an instance, if it did.

    Args:
        module: The user's own module, out of its wrappers.
    """
    own: dict[str, Any] = module.__dict__
    own.pop(AUTOCAST, None)
    original: Callable | None = own.pop("_original_forward", None)
    if original is None:
        return
    own.pop("forward", None)
    # A forward that was on the instance before (a hook's, a patch) goes back there; a class's own needs no entry.
    if getattr(original, "__func__", None) is not getattr(type(module), "forward", None):
        own["forward"] = original
