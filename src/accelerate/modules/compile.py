"""Compilation of modules, whole or region by region, and questions about what is compiled.

A model of many equal blocks compiles much faster when one block is compiled and its code reused for the others: that is
regional compilation.

Source:
    https://docs.pytorch.org/tutorials/recipes/regional_compilation.html
"""

import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accelerate.modules.unwrap import ORIGINAL, is_compiled_module


def has_compiled_regions(module: nn.Module) -> bool:
    """Say whether a module, or anything inside it, is a ``torch.compile`` wrapper.

    Args:
        module: Any module.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        return False
    return any(is_compiled_module(part) for part in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Say whether a module is a list of blocks of one class, such as the layers of a transformer.

    Args:
        module: Any module.
    """
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and len({type(block) for block in module.children()}) == 1
    )


def has_repeated_blocks(module: nn.Module) -> bool:
    """Say whether a module is, or contains at any depth, a list of blocks of one class.

    Args:
        module: Any module.
    """
    return any(is_repeated_blocks(part) for part in module.modules())


def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """Return a model's submodules, each one after all of its children, and the model itself last.

    A module that is registered twice is listed twice, under each of its names.

    Args:
        model: The root module.
        return_fqns: Return pairs of dotted name and module; the root's name is ``""``.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Tanh()))
        >>> [name for name, _ in get_module_children_bottom_up(net, return_fqns=True)]
        ['0', '1.0', '1', '']
    """
    pairs = list(_bottom_up(model, ""))
    return pairs if return_fqns else [module for _, module in pairs]


def _bottom_up(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _bottom_up(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def _has_forward(module: nn.Module) -> bool:
    """Say whether a module can be called; a container such as ModuleList or ParameterList only holds others."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _is_region(module: nn.Module) -> bool:
    """Say whether a module is compiled as one piece: it can be called and no repeated blocks are inside."""
    return _has_forward(module) and not has_repeated_blocks(module)


def _twin(module: nn.Module) -> nn.Module:
    """Return a module of the same class that shares parameters, buffers and hooks, with its own dict of children."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, _modules=dict(module._modules))
    forward = module.__dict__.get("forward")
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        twin.__dict__["forward"] = types.MethodType(forward.__func__, twin)
    return twin


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a module whose regions are compiled, its parameters shared with the one given, which stays as it is.

    Each block of a list of equal blocks is a region, so that its code is compiled once; elsewhere the largest modules
    without such a list inside are regions. The modules above the regions stay uncompiled.

    Args:
        module: The module to compile.
        **compile_kwargs: Passed to ``torch.compile``.

    Example:
        >>> net = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.ReLU(), torch.nn.ReLU()])})
        >>> compiled = compile_regions(net, backend="eager")
        >>> is_compiled_module(compiled), is_compiled_module(compiled["blocks"][0]), is_compiled_module(net["blocks"][0])
        (False, True, False)
    """
    made: dict[int, nn.Module] = {}  # a module registered twice must stay one module

    def compiled(part: nn.Module, whole: bool) -> nn.Module:
        if id(part) not in made:
            if is_compiled_module(part):
                made[id(part)] = part
            elif whole or _is_region(part):
                made[id(part)] = torch.compile(part, **compile_kwargs)
            elif not part._modules:
                made[id(part)] = part
            else:
                twin = made[id(part)] = _twin(part)
                twin.__dict__[ORIGINAL] = part
                blocks = is_repeated_blocks(part)
                for name, child in part._modules.items():
                    if child is not None:
                        twin._modules[name] = compiled(child, whole=blocks)
        return made[id(part)]

    return compiled(module, whole=False)


def _compile_regions_in_place(module: nn.Module, compile_kwargs: dict[str, Any]) -> None:
    if _is_region(module):
        module.compile(**compile_kwargs)
        return
    blocks = is_repeated_blocks(module)
    for child in module.children():
        if blocks:
            child.compile(**compile_kwargs)
        else:
            _compile_regions_in_place(child, compile_kwargs)


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile a module's regions in place, as DeepSpeed needs it: its engine holds the modules themselves.

    Args:
        module: The module to compile; see ``compile_regions`` for what a region is.
        **compile_kwargs: Passed to ``Module.compile``.
    """
    _compile_regions_in_place(module, compile_kwargs)


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile a module's regions in place and return it, as fully_shard needs it: its hooks are on the modules.

    Args:
        module: The module to compile; see ``compile_regions`` for what a region is.
        **compile_kwargs: Passed to ``Module.compile``.
    """
    _compile_regions_in_place(module, compile_kwargs)
    return module
