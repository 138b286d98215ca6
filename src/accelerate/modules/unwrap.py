"""Taking a model, and the names of its parameters, out of what training put around it: parallel wrappers, compilation, a replaced
forward.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

# Attribute of a module in which mixed precision keeps what a pickle needs of its forward.
AUTOCAST = "_accelerate_autocast"

# Where a module compiled by regions keeps the module it was made from. Kept out of the registered submodules, so that
# parameters are not listed twice.
ORIGINAL = "_orig_mod"

# The attribute under which each kind of wrapper keeps the module inside it, at whatever depth.
INNER_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

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


def is_compiled_module(module: nn.Module) -> bool:
    """Say whether a module is the wrapper that ``torch.compile`` returns.

    A module compiled in place with ``module.compile()`` is no wrapper, and neither is one compiled by regions.

    Args:
        module: Any module.

    Example:
        >>> is_compiled_module(nn.Linear(2, 2))
        False
    """
    # Asking for torch._dynamo imports it, which takes seconds; while it is not loaded nothing can be compiled.
    frame = sys.modules.get("torch._dynamo.eval_frame")
    return frame is not None and isinstance(module, frame.OptimizedModule)


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


# Names of parameters


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that torch.compile, FSDP1 and activation checkpointing put in.

    The leading ``module.`` of DistributedDataParallel stays, because a user's own attribute may have that name.

    Args:
        name: A dotted name from ``named_parameters`` or a state dict.

    Example:
        >>> canonical_name("layers.0._orig_mod.weight")
        'layers.0.weight'
    """
    return ".".join([part for part in name.split(".") if part not in INNER_ATTRIBUTES])


def canonical_parameters(*modules: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of several modules under their canonical names.

    Args:
        *modules: Their names must not collide.

    Raises:
        ValueError: Two modules have a parameter of the same name.
    """
    found: dict[str, nn.Parameter] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            plain = canonical_name(name)
            if plain in found and found[plain] is not parameter:
                raise ValueError(f"Two parameters are called {plain!r}; pass one module at a time.")
            found[plain] = parameter
    return found


def match_names(wanted: Iterable[str], found: Iterable[str]) -> dict[str, str]:
    """Pair each found name with the wanted one that means the same parameter, whatever wrappers wrote the names.

    Equal names pair first. The others pair when they are equal without wrapper parts and without a leading
    ``module.``, provided that this is unambiguous.

    Args:
        wanted: Names that a model has.
        found: Names that a file has.

    Returns:
        Found name to wanted name; names without a partner are absent.

    Example:
        >>> match_names(["weight", "bias"], ["module._orig_mod.weight", "other"])
        {'module._orig_mod.weight': 'weight'}
    """
    wanted, found = list(wanted), list(found)
    known = set(wanted)
    pairs = {name: name for name in found if name in known}
    open_wanted: dict[str, list[str]] = {}
    for name in known.difference(pairs):
        open_wanted.setdefault(_bare(name), []).append(name)
    open_found: dict[str, list[str]] = {}
    for name in found:
        if name not in pairs:
            open_found.setdefault(_bare(name), []).append(name)
    for bare, names in open_found.items():
        partners = open_wanted.get(bare, [])
        if len(names) == len(partners) == 1:
            pairs[names[0]] = partners[0]
    return pairs


def _bare(name: str) -> str:
    return canonical_name(name).removeprefix("module.")
