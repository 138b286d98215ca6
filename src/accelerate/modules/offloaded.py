"""Modules whose hook keeps their weights elsewhere between forwards, known by the attributes of the hook."""

from typing import Any

from torch import nn


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """Return a module's hook and, if it combines several, those hooks; only None if there is none."""
    hook = module.__dict__.get("_hf_hook")
    return (hook, *getattr(hook, "hooks", ()))


def offloading_hook(module: nn.Module) -> Any | None:
    """Return the hook that keeps a module's weights elsewhere, known by its attributes."""
    offload = (h for h in hooks_of(module) if getattr(h, "offload", False) is True and hasattr(h, "weights_map"))
    return next(offload, None)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a module's own hook keeps its weights elsewhere between forwards.

    Args:
        module: Any module; its submodules are not looked at.

    Example:
        >>> import torch
        >>> from accelerate.utils import has_offloaded_params
        >>> has_offloaded_params(torch.nn.Linear(1, 1))
        False
    """
    hook = module.__dict__.get("_hf_hook")
    return hook is not None and offloading_hook(module) is hook
