"""How a model is described to FSDP: which modules become shards or stay unsharded, and how tied and loaded weights reach them."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from accelerate.config.fsdp import FullyShardedDataParallelPlugin, layer_classes
from accelerate.logging import get_logger
from accelerate.runtime import torch_private

logger = get_logger("accelerate.utils.fsdp_utils")  # the public path


def public_module() -> ModuleType:
    """Return `accelerate.utils.fsdp_utils`, in which libraries replace functions and the logger: theirs are used."""
    return importlib.import_module("accelerate.utils.fsdp_utils")


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device
) -> set[nn.Parameter]:
    """Return the parameters of some modules, moved to a device, so that FSDP can leave them unsharded.

    Args:
        modules: modules, or a regular expression that fully matches a module's name; None means none.
        model: the model with these names.
        device: the target, because FSDP does not move ignored parameters.

    Example:
        >>> len(get_parameters_from_modules("0", nn.Sequential(nn.Linear(2, 2)), torch.device("cpu")))
        2
    """
    return {parameter for module in chosen_modules(modules, model) for parameter in module.to(device).parameters()}


def chosen_modules(modules: Any, model: nn.Module) -> Iterable[nn.Module]:
    """Return the modules that a plugin's `ignored_modules` stands for; see `get_parameters_from_modules`."""
    if isinstance(modules, str):
        return [module for name, module in model.named_modules() if re.fullmatch(modules, name)]
    if isinstance(modules, nn.Module) and not isinstance(modules, (nn.ModuleList, nn.Sequential)):
        return [modules]
    return () if modules is None else modules


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Turn the plugin's wrapping policy into a function that says of a module whether it is sharded separately.

    Args:
        fsdp2_plugin: its `auto_wrap_policy` is one of torch's policies, bound to a model or not, one of its policy objects, or
            a callable. The callable takes a module, or the arguments of torch's policies (`module`, `recurse`,
            `nonwrapped_numel`).
        model: the model about to be sharded.

    Returns:
        The function, or None if only the full model is sharded.

    Raises:
        ValueError: a class name of the plugin does not occur in the model.
    """
    from torch.distributed.fsdp import wrap

    policy = fsdp2_plugin.auto_wrap_policy
    bound = policy.keywords if isinstance(policy, partial) else {}
    function = policy.func if isinstance(policy, partial) else policy
    if function is None:
        return None
    if function is wrap.transformer_auto_wrap_policy:
        classes = bound.get("transformer_layer_cls")
        classes = tuple(layer_classes(fsdp2_plugin, model) if classes is None else classes)
        return lambda module: isinstance(module, classes)
    if function is wrap.size_based_auto_wrap_policy:
        smallest = bound.get("min_num_params", fsdp2_plugin.min_num_params)
        return (lambda module: _numel(module) >= smallest) if smallest else None
    if torch_private.is_wrap_policy(policy):
        selected = torch_private.chosen_modules(policy, model)
        return lambda module: module in selected
    chooses: Callable[..., Any] = policy  # type: ignore[assignment]  # the plugin has replaced names
    parameters = inspect.signature(chooses).parameters
    if "recurse" in parameters:
        size = {"nonwrapped_numel"} & set(parameters)
        return lambda module: chooses(module, recurse=False, **{name: _numel(module) for name in size})
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return lambda module: chooses(module=module, recurse=False, nonwrapped_numel=_numel(module))
    return chooses


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
