"""Hooks that put weights and inputs on the right device around forward: how a model gets them.

The hooks themselves are in `accelerate.extensions.big_models`; this module is where users find them, and where other libraries patch
`AlignDevicesHook`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from accelerate.base import _lazy
from accelerate.extensions.big_models.align import AlignDevicesHook
from accelerate.extensions.big_models.hooks_base import (  # noqa: F401  users find them here
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    _accelerate_added_attributes,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.extensions.big_models.placement import Device
from accelerate.extensions.big_models.store import PrefixedDataset
from accelerate.extensions.big_models.tensors import named_module_tensors

__getattr__ = _lazy.aliases("accelerate.hooks")


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = None,
) -> None:
    """Give every module without a hook, that has weights, one that brings it and its inputs to a device.

    Args:
        module: The root; it and everything below get hooks.
        execution_device: Where forwards run.
        skip_keys: Keyword arguments that stay where they are.
        preload_module_classes: Names of classes below which nothing gets a hook, because such modules use weights of
            their submodules without calling their forward.
        tied_params_map: As for `AlignDevicesHook`.
    """
    # Whether its state dict has entries: to build that for every module would cost the depth of the model.
    own = (next(named_module_tensors(part, remove_non_persistent=True), None) for part in module.modules())
    if "_hf_hook" not in module.__dict__ and any(tensor is not None for tensor in own):
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ not in (preload_module_classes or ()):
        for child in module.children():
            attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = None,
) -> None:
    """Give every module that directly owns tensors an `AlignDevicesHook`.

    Args:
        module: The root; it and everything below are searched.
        execution_device: Where forwards run.
        offload: Keep weights elsewhere between forwards.
        weights_map: Offloaded weights by full name. None: the present weights, on the CPU.
        offload_buffers: Offload buffers too.
        module_name: Full name of ``module``, which names in ``weights_map`` begin with.
        skip_keys: Keyword arguments that stay where they are.
        preload_module_classes: Names of classes whose instances load everything below them at once.
        tied_params_map: As for `AlignDevicesHook`.
    """

    options = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    hook_for = partial(AlignDevicesHook, execution_device, offload, **options)

    def visit(current: nn.Module, name: str) -> None:
        whole = offload and type(current).__name__ in (preload_module_classes or ())
        prefix = f"{name}." if name else ""
        if whole or next(named_module_tensors(current), None) is not None:
            source = None if weights_map is None else PrefixedDataset(weights_map, prefix)
            hook = hook_for(weights_map=source, offload_buffers=offload_buffers, place_submodules=whole)
            add_hook_to_module(current, hook, append=True)
        for child_name, child in current.named_children() if not whole else ():
            visit(child, prefix + child_name)

    visit(module, module_name)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = None,
) -> None:
    """Give the blocks of a model the hooks that its device map asks for.

    A block that stays on its device is placed there in full; one that is offloaded gets a hook on every module
    below it that owns weights. The root gets a hook that returns outputs on the inputs' device.

    Args:
        module: The root; it and everything below are searched.
        execution_device: Where blocks run: one device for all, or block name to device.
        offload: Which blocks keep their weights elsewhere between forwards: all or none, or block name to bool.
        weights_map: Offloaded weights by full name. None: the present weights, on the CPU.
        offload_buffers: Offload buffers too.
        module_name: Full name of ``module``, which block names begin with.
        skip_keys: Keyword arguments that stay where they are.
        preload_module_classes: Names of classes whose instances load everything below them at once.
        tied_params_map: As for `AlignDevicesHook`.
    """
    common = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    preload = {"preload_module_classes": preload_module_classes, **common}
    hook_for = partial(AlignDevicesHook, **common)
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(
                module, execution_device, True, weights_map, offload_buffers, module_name, **preload
            )
        else:
            add_hook_to_module(module, hook_for(execution_device, io_same_device=True, place_submodules=True))
        return
    if not isinstance(execution_device, Mapping):
        execution_device = dict.fromkeys(offload, execution_device)
    if not isinstance(offload, Mapping):
        offload = dict.fromkeys(execution_device, offload)
    for name, current in module.named_modules(prefix=module_name):
        if name not in execution_device or name not in offload:
            # The root, and modules whose own tensors have entries in the map because the module was split.
            prefix = f"{name}." if name else ""
            names = [prefix + tensor for tensor, _ in named_module_tensors(current)]
            own = [tensor for tensor in names if tensor in execution_device]
            if not own and name != "":
                continue
            offloaded = any(offload.get(tensor, False) for tensor in own) and weights_map is not None
            device = execution_device.get(name, execution_device[own[0]] if own else None)
            source = PrefixedDataset(weights_map, prefix) if offloaded else None
            hook = hook_for(device, offloaded, name == "", source, offloaded and offload_buffers)
            # The root's hook is that of the last dispatch; one below it may be another library's.
            add_hook_to_module(current, hook, append=name != "")
        elif offload[name]:
            device = execution_device[name]
            attach_align_device_hook(current, device, True, weights_map, offload_buffers, name, **preload)
            if "_hf_hook" not in current.__dict__:
                # A block without direct weights still has to bring its inputs along.
                add_hook_to_module(current, hook_for(device, io_same_device=name == ""))
            attach_execution_device_hook(current, device, **preload)
        else:
            device = execution_device[name]
            buffers = {"offload_buffers": offload_buffers}
            add_hook_to_module(current, hook_for(device, io_same_device=name == "", place_submodules=True, **buffers))
            attach_execution_device_hook(current, device, **common)
