"""Compilation of a model by its regions, in a twin of it or in place.

A model of many equal blocks compiles much faster if one block is compiled and its code reused for the others. See
https://docs.pytorch.org/tutorials/recipes/regional_compilation.html.
"""

import functools
import sys
import types
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import nn

from accelerate.base._warn import warn_user
from accelerate.data.contents import references
from accelerate.modules.unwrap import ORIGINAL, is_compiled_module
from accelerate.runtime import torch_private


def _compile_regions(run: Any, model: nn.Module, in_place: bool, options: dict[str, Any]) -> nn.Module:
    """Return a model of the run with its regions compiled: the same model if `in_place`, else a twin of it.

    Not a collective.
    """
    return compile_regions_fsdp2(model, **options) if in_place else compile_regions(model, **options)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a module, or anything inside it, is a ``torch.compile`` wrapper.

    Args:
        module: Any module.

    Example:
        >>> from accelerate.utils import has_compiled_regions
        >>> has_compiled_regions(torch.nn.Linear(1, 1))
        False
    """
    return "torch._dynamo.eval_frame" in sys.modules and any(is_compiled_module(part) for part in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks of one class, such as the layers of a transformer.

    Args:
        module: Any module.
    """
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and len({type(block) for block in module.children()}) == 1
    )


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is, or contains at any depth, a list of blocks of one class.

    Args:
        module: Any module.
    """
    return any(is_repeated_blocks(part) for part in module.modules())


def _is_region(module: nn.Module) -> bool:
    """Return whether a module is compiled as one piece: no mere container, and without repeated blocks inside."""
    called = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    return called and not has_repeated_blocks(module)


def _twin(module: nn.Module) -> nn.Module:
    """Return a module of the same class that shares parameters, buffers and hooks, with its own dict of children."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, _modules=dict(module._modules))
    for name, value in module.__dict__.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            twin.__dict__[name] = types.MethodType(value.__func__, twin)
    return twin


# The tables of every module. A twin gets their entries, or is the argument of the entries.
_TABLES = vars(nn.Module()).keys()


def _needs_identity(module: nn.Module) -> bool:
    """Return whether a module calls itself or its parts through something that a twin cannot replace.

    Such are the forward of a hook, a closure around the former forward, and a list of submodules.
    """
    if getattr(module.forward, "__self__", None) is not module:
        return True
    parts, seen = set(map(id, module.modules())), set()
    values = [value for name, value in vars(module).items() if name not in _TABLES]
    # A twin's methods are bound to the twin, so only their functions count.
    pending = [value.__func__ if getattr(value, "__self__", None) is module else value for value in values]
    while pending:
        value = pending.pop()
        if id(value) in parts:
            return True
        if id(value) not in seen:
            seen.add(id(value))
            pending += references(value)
    return False


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a module with compiled regions that shares its parameters with the given one, which stays unchanged.

    Each block of a list of equal blocks is a region, so that its code is compiled once; elsewhere the largest modules
    without such a list inside are regions. The modules above the regions stay uncompiled.

    Regions below a module whose ``forward`` was replaced (a hook, a closure) are compiled in place, because that
    forward calls the original modules.

    Args:
        module: The module to compile.
        **compile_kwargs: Passed to ``torch.compile``.

    Example:
        >>> net = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.ReLU(), torch.nn.ReLU()])})
        >>> compiled = compile_regions(net, backend="eager")
        >>> is_compiled_module(compiled), is_compiled_module(compiled["blocks"][0]), is_compiled_module(net["blocks"][0])
        (False, True, False)
    """
    compiled_parts: dict[int, nn.Module] = {}  # a module registered twice must stay one module

    def in_place(part: nn.Module) -> None:
        if part._compiled_call_impl is None:
            part.compile(**compile_kwargs)

    def compiled(part: nn.Module, whole: bool) -> nn.Module:
        if id(part) not in compiled_parts:
            if is_compiled_module(part):
                compiled_parts[id(part)] = part
            elif whole or _is_region(part):
                compiled_parts[id(part)] = torch.compile(part, **compile_kwargs)
            elif not part._modules:
                compiled_parts[id(part)] = part
            elif _needs_identity(part):
                _compile_parts(part, in_place)
                compiled_parts.update((id(inner), inner) for inner in part.modules())
            else:
                twin = compiled_parts[id(part)] = _twin(part)
                twin.__dict__[ORIGINAL] = part
                blocks = is_repeated_blocks(part)
                for name, child in part._modules.items():
                    if child is not None:
                        twin._modules[name] = compiled(child, whole=blocks)
        return compiled_parts[id(part)]

    return compiled(module, whole=False)


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile a module's regions in place, as DeepSpeed needs it: its engine holds the modules themselves.

    Args:
        module: The module to compile; see ``compile_regions`` for the regions.
        **compile_kwargs: Passed to ``Module.compile``.
    """
    _compile_parts(module, lambda part: part.compile(**compile_kwargs))


def _compile_parts(
    module: nn.Module,
    compile_one: Callable[[nn.Module], Any],
    whole: bool = False,
    units: Set[nn.Module] = frozenset(),
) -> None:
    if is_compiled_module(module):
        return
    inner = next(module.children()) if isinstance(module, torch_private.ActivationWrapper) else None
    whole = whole or module in units
    if inner is not None:  # what recomputes is around a compiled block, not in it
        _compile_parts(inner, compile_one, whole, units)
    elif whole or _is_region(module) and units.isdisjoint(module.modules()):
        compile_one(module)
    else:
        blocks = is_repeated_blocks(module)
        for child in module.children():
            _compile_parts(child, compile_one, blocks, units)


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile a module's regions in place and return it, as fully_shard needs it: its hooks are on the modules.

    Args:
        module: The module to compile; see ``compile_regions`` for the regions. An innermost unit of ``fully_shard`` is also one.
        **compile_kwargs: Passed to ``Module.compile``.
    """
    if units := torch_private.sharded_units(module):
        innermost = {unit for unit in units if unit is not module and len(torch_private.sharded_units(unit)) == 1}
        _compile_parts(module, functools.partial(_compile_forward, compile_kwargs), units=innermost)
        if all("forward" not in part.__dict__ for part in module.modules()):
            warn_user(
                f"TorchDynamoPlugin(use_regional_compilation=True) compiled nothing of {type(module).__name__}: it has no list of equal blocks, "
                "and no unit of FSDP2 but single layers. Name its blocks in transformer_cls_names_to_wrap."
            )
    else:
        compile_regions_deepspeed(module, **compile_kwargs)
    return module


def _compile_forward(options: dict[str, Any], module: nn.Module) -> None:
    """Compile a module's forward without the hooks of `fully_shard`: it is one graph then, and `fullgraph` holds."""
    module_name = torch_private.shards_own_class(module).__module__
    # A single layer of torch gains nothing, and all such layers share one function, of which torch keeps few versions.
    if next(module.children(), None) is not None or not module_name.startswith("torch.nn."):
        module.forward = torch.compile(module.forward, **options)
