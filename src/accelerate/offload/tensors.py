"""The parameters and buffers of a module, by name."""

from collections.abc import Iterator

import torch
from torch import nn


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that a module keeps out of its state dict. The module is only read.

    Args:
        module: The module to look into.
        recurse: Also look into its submodules.
        fqns: With ``recurse``, return names as ``named_buffers`` writes them (``"block.mask"``); otherwise only the
            last part, without saying in which submodule.

    Example:
        >>> block = nn.Module()
        >>> block.register_buffer("mask", torch.ones(2), persistent=False)
        >>> get_non_persistent_buffers(nn.Sequential(block), recurse=True, fqns=True)
        {'0.mask'}
    """
    if not recurse:
        return set(module._non_persistent_buffers_set)
    names = set()
    for path, submodule in module.named_modules():
        prefix = f"{path}." if fqns and path else ""
        names.update(prefix + name for name in submodule._non_persistent_buffers_set)
    return names


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a module and then its buffers, with their names.

    Args:
        module: The module to read.
        include_buffers: Yield buffers as well.
        recurse: Include the tensors of submodules; a tensor reached twice comes once.
        remove_non_persistent: Leave out buffers that are not in the state dict.

    Example:
        >>> [name for name, _ in named_module_tensors(nn.Linear(2, 2))]
        ['weight', 'bias']
    """
    if not recurse or not module._modules:
        # Hooks ask this of every module of a model; the general way below costs ten times as much.
        yield from _direct(module._parameters)
        left_out = module._non_persistent_buffers_set if remove_non_persistent else ()
        if include_buffers:
            yield from (pair for pair in _direct(module._buffers) if pair[0] not in left_out)
        return
    yield from module.named_parameters(recurse=True)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse=True, fqns=True) if remove_non_persistent else ()
        for name, buffer in module.named_buffers(recurse=True):
            if name not in left_out:
                yield name, buffer


def _direct(table: dict[str, torch.Tensor | None]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of one module's table; one that has two names comes once."""
    seen: set[int] = set()
    # A list, because who iterates replaces tensors meanwhile.
    return [(name, t) for name, t in table.items() if t is not None and not (id(t) in seen or seen.add(id(t)))]


def tensor_at(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that directly owns a tensor and the tensor's name in it.

    Args:
        module: The module that the name starts from.
        name: Dotted name of a parameter or buffer.

    Raises:
        AttributeError: A module on the way does not exist.
    """
    path, _, last = name.rpartition(".")
    return (module.get_submodule(path) if path else module), last
