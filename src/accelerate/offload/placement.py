"""Tensors on devices: making them there, putting one of a module there, or all of a module for the length of a block."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accelerate.devices.probe import detect
from accelerate.offload.quantized import FOUR_BIT, is_settled, place_quantized, quantizes
from accelerate.offload.tensors import tensor_at
from accelerate.runtime import storage
from accelerate.utils.environment import parse_flag_from_env

Device = int | str | torch.device

# Types of arguments that hold no tensors and have no `to`; others join when they are first seen.
_INERT: set[type] = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
# Tensors that are what their data is; the others have to be made by their class.
_PLAIN = (nn.Parameter, torch.Tensor)


def as_device(device: Device) -> torch.device:
    """Return a device given by index, name or object; an index means an accelerator of the kind this machine has.

    Args:
        device: The device, as it stands in a device map.

    Raises:
        ValueError: An index on a machine without accelerator, or a name that torch does not know, such as ``"disk"``.
    """
    if isinstance(device, int):
        kind = detect().type
        if kind == "cpu":
            raise ValueError(
                f"device={device} asks for accelerator {device}, but torch finds none on this machine. Use 'cpu' or "
                "'disk' in the device map, or install a torch build for your accelerator."
            )
        return torch.device(kind, device)
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is no torch device. Use an index, 'cpu', 'meta' or 'cuda:0'.") from error


def exact_device(device: Device) -> torch.device:
    """Return a device with the index that tensors on it tell, so that the two compare equal.

    Args:
        device: The device, as it stands in a device map.
    """
    found = as_device(device)
    if found.index is None and found.type not in ("cpu", "meta"):
        return torch.empty(0, device=found).device
    return found


def any_elsewhere(value: Any, device: torch.device) -> bool:
    """Say whether something among a forward's arguments may have to move to a device.

    Args:
        value: Arguments: tensors, nested in tuples, lists and dicts, and anything else.
        device: The device, as `exact_device` returns it.

    Returns:
        False if all tensors are there. True also for objects that nobody can look into, such as batches with a `to` of their
        own.

    Example:
        >>> any_elsewhere((torch.ones(1), {"past": None}), torch.device("cpu"))
        False
    """
    kind = type(value)
    if kind in _INERT:
        return False
    if kind is tuple or kind is list:
        for item in value:  # noqa: SIM110 - a generator costs more than the look
            if any_elsewhere(item, device):
                return True
        return False
    if kind is dict:
        for item in value.values():  # noqa: SIM110
            if any_elsewhere(item, device):
                return True
        return False
    if isinstance(value, torch.Tensor):
        return value.device != device
    if hasattr(value, "to") or isinstance(value, (tuple, list)) or hasattr(value, "keys"):
        return True
    _INERT.add(kind)
    return False


def default_device() -> torch.device:
    """Return the device that this process computes on; the accelerator's current one, if there is no state yet."""
    device = storage.process.current.get("device")
    if device is not None:
        return device
    kind = detect()
    return torch.device("cpu") if kind.type == "cpu" else kind.current()


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Say whether two devices are one; a device other than the CPU is without index the one with index 0.

    Args:
        first_device: A device.
        second_device: Another one.
    """
    if first_device.type != second_device.type:
        return False
    if first_device.type == "cpu":
        return first_device.index == second_device.index
    return (first_device.index or 0) == (second_device.index or 0)


def _as_parameter(old: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """Make a value a parameter of the old one's class, with the old one's attributes."""
    trainable = old.requires_grad and (value.is_floating_point() or value.is_complex())
    kind = type(old)
    if (kind is nn.Parameter and type(value) in _PLAIN) or (
        kind is not nn.Parameter and issubclass(kind, nn.Parameter) and type(value) in (*_PLAIN, kind)
    ):
        # The class's own constructor may ask for arguments that nobody here knows.
        parameter = torch.Tensor._make_subclass(kind, value, trainable)
    else:
        # nn.Parameter() keeps tensor subclasses (torchao, quanto) what they are.
        parameter = nn.Parameter(value.detach(), requires_grad=trainable)
    attributes = getattr(old, "__dict__", None)
    if attributes:
        for name, attribute in attributes.items():
            parameter.__dict__.setdefault(name, attribute)
    return parameter


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer onto a device, with a new value if one is given.

    Module.to() cannot do this: it moves all or nothing, and cannot fill a tensor on the meta device. A parameter is
    replaced by a new one of the same class; ``requires_grad`` and attributes carry over.

    Args:
        module: The module that the name starts from.
        tensor_name: Dotted name of the parameter or buffer.
        device: Where it goes: accelerator index, name, or ``torch.device``; ``"meta"`` drops the data.
        value: The new value, of the same shape. None moves the present one.
        dtype: Cast to this dtype. None: a new value is cast to the dtype that the tensor had.
        fp16_statistics: Scales of an 8-bit weight of bitsandbytes, stored as its ``SCB``. Floating-point values for layers of
            bitsandbytes are quantised, and need none.
        tied_params_map: ``data_ptr`` of a shared weight -> device -> its copy there. A weight found in it is reused
            instead of copied again; an entry without this device receives the copy.
        non_blocking: Let the copy overlap with computation where memory is pinned.
        clear_cache: Give freed accelerator memory back to the driver afterwards.

    Raises:
        AttributeError: A module in the name does not exist.
        ValueError: The tensor does not exist, the shape differs, data is wanted of a meta tensor, or a quantised value comes
            without its scales.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> set_module_tensor_to_device(layer, "weight", "meta")
        >>> set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2))
    """
    owner, name = _owner(module, tensor_name) if "." in tensor_name else (module, tensor_name)
    table = owner._parameters
    old = table.get(name)
    if old is None:
        table, old = owner._buffers, _registered(owner, name, tensor_name)
    target = device if type(device) is torch.device else as_device(device)
    to_meta = target.type == "meta"
    if value is None:
        if old.is_meta and not to_meta:
            raise ValueError(
                f"{tensor_name!r} is on the meta device and has no data: pass a `value` to put it on {target}."
            )
    elif old.shape != value.shape:
        _check_packed(tensor_name, old, value)

    key = None
    if tied_params_map is not None and not to_meta:
        key = (old if value is None else value).data_ptr()
        if key in tied_params_map and device in tied_params_map[key]:
            table[name] = tied_params_map[key][device]
            return
    if isinstance(dtype, str):
        dtype = _dtype_called(dtype)
    if type(old) not in _PLAIN and quantizes(old):
        same = value is None and fp16_statistics is None and is_settled(old, dtype)
        stays = same and check_device_same(old.device, target)
        new = old if stays else place_quantized(owner, name, value, target, dtype, fp16_statistics, non_blocking)
        table[name] = new
    else:
        new = _moved(old, value, target, dtype, table is owner._buffers, non_blocking)
        table[name] = new
        if fp16_statistics is not None:
            new.SCB = fp16_statistics.to(target)
    if key is not None and key in tied_params_map:
        tied_params_map[key][device] = new
    if clear_cache and not to_meta and target.type != "cpu":
        detect().empty_cache()


def _owner(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """What `tensor_at` returns, without its checks of every step."""
    *path, name = tensor_name.split(".")
    owner: Any = module
    try:
        for part in path:
            owner = owner._modules[part]
        return (owner, name) if owner is not None else tensor_at(module, tensor_name)
    except (KeyError, AttributeError):
        return tensor_at(module, tensor_name)


def _dtype_called(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={name!r} is no dtype of torch. Give one such as torch.float16, or its name.")
    return found


def _registered(owner: nn.Module, name: str, full_name: str) -> torch.Tensor:
    """The buffer of this name, where there is no parameter."""
    if name not in owner._buffers and name not in owner._parameters:
        raise ValueError(f"{type(owner).__name__} has no parameter or buffer named {name!r} (of {full_name!r}).")
    buffer = owner._buffers.get(name)
    if buffer is None:
        raise ValueError(
            f"{full_name!r} is registered as None in {type(owner).__name__}, so there is nothing to place."
        )
    return buffer


def _check_packed(name: str, old: torch.Tensor, value: torch.Tensor) -> None:
    """Another shape is an error, but for 4-bit weights: those are packed, so that theirs says nothing about the layer's."""
    if type(old).__name__ not in FOUR_BIT:
        raise ValueError(
            f"The value for {name!r} has shape {tuple(value.shape)}, but the module has {tuple(old.shape)}. Check that "
            "the checkpoint belongs to this model."
        )


def _moved(
    old: torch.Tensor,
    value: torch.Tensor | None,
    target: torch.device,
    dtype: torch.dtype | None,
    is_buffer: bool,
    non_blocking: bool,
) -> torch.Tensor:
    source = old if value is None else value
    if dtype is None:
        dtype = old.dtype  # a new value takes the place's dtype
    elif not source.is_floating_point() and not source.is_complex():
        dtype = source.dtype
    if value is None and dtype is old.dtype and check_device_same(old.device, target):
        return old
    if source.requires_grad:
        source = source.detach()  # else the graph is told of the copy
    if type(source) in _PLAIN:
        moved = source.to(target, dtype, non_blocking)
    else:
        # `to` of a tensor subclass may take a cast and a move one at a time only.
        moved = (source if dtype is source.dtype else source.to(dtype)).to(target, non_blocking=non_blocking)
    if not is_buffer:
        return _as_parameter(old, moved)
    return moved.detach() if moved.requires_grad or isinstance(moved, nn.Parameter) else moved


def offloading_hook(module: nn.Module) -> Any | None:
    """The hook (or the one among several) that keeps a module's weights elsewhere. Known by its attributes, because
    the hook classes are built on this file."""
    hook = module.__dict__.get("_hf_hook")
    for candidate in (hook, *getattr(hook, "hooks", ())):
        if getattr(candidate, "offload", False) is True and hasattr(candidate, "weights_map"):
            return candidate
    return None


def has_offloaded_params(module: nn.Module) -> bool:
    """Say whether a module's own hook keeps its weights elsewhere between forwards.

    Args:
        module: Any module; its submodules are not looked at.
    """
    hook = module.__dict__.get("_hf_hook")
    return hook is not None and offloading_hook(module) is hook


@contextlib.contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Have a module's own tensors on a device inside a ``with`` block, and where they were after it.

    Changes made inside stay, except to weights that are offloaded to disk.

    Args:
        module: The module; its submodules are left alone.
        execution_device: The device to use. None: the one that an offloading hook uses; without such a hook nothing
            moves.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> with align_module_device(layer, "meta"):
        ...     layer.weight.device.type
        'meta'
    """
    hook = offloading_hook(module)
    if hook is not None:
        usual = hook.execution_device
        if execution_device is not None:
            hook.execution_device = execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = usual
    elif execution_device is not None:
        originals = dict(module.named_parameters(recurse=False))
        try:
            for name in originals:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, original in originals.items():
                _bring_back(module, name, original)
    else:
        yield


def _bring_back(module: nn.Module, name: str, original: torch.Tensor) -> None:
    table = module._parameters if name in module._parameters else module._buffers
    current = table.get(name)
    if current is original or current is None:
        return
    if current.device.type != "meta":
        if current.shape != original.shape or current.dtype != original.dtype:
            set_module_tensor_to_device(module, name, original.device)
            return
        with torch.no_grad():
            original.copy_(current)
    table[name] = original


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Have the parameters of modules made inside live on the meta device, so that a model larger than memory can be made.

    Works as a ``with`` block and as a decorator. Such a model has shapes and dtypes, but no data: load a checkpoint with
    `load_checkpoint_and_dispatch` before using it.

    Args:
        include_buffers: Put buffers on the meta device too, and every other tensor made inside. None: as
            ``ACCELERATE_INIT_INCLUDE_BUFFERS`` says, else no.

    Example:
        >>> with init_empty_weights():
        ...     layer = nn.Linear(1000, 1000)
        >>> layer.weight.device.type
        'meta'
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: int | str | torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Have the parameters of modules made inside live on a device. Works as a ``with`` block and as a decorator.

    Args:
        device: The device.
        include_buffers: Put buffers there too, and every other tensor made inside. None: as
            ``ACCELERATE_INIT_INCLUDE_BUFFERS`` says, else no.

    Example:
        >>> @init_on_device("meta")
        ... def build():
        ...     return nn.Linear(2, 2)
        >>> build().weight.device.type
        'meta'
    """
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    if include_buffers:
        # torch makes every tensor there; no memory is ever taken elsewhere.
        with torch.device(device):
            yield
        return
    register = nn.Module.register_parameter

    def register_on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            module._parameters[name] = _parameter_on(param, torch.device(device))

    nn.Module.register_parameter = register_on_device
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _parameter_on(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if parameter.device == device:
        return parameter
    # Out of the meta device there is nothing to copy: such a parameter is still to be initialised.
    made = (
        torch.empty_like(parameter, device=device)
        if parameter.device.type == "meta"
        else parameter.detach().to(device)
    )
    if type(parameter) is nn.Parameter or not issubclass(type(parameter), nn.Parameter):
        new = nn.Parameter(made, requires_grad=parameter.requires_grad)
    else:
        new = torch.Tensor._make_subclass(type(parameter), made, parameter.requires_grad)
    new.__dict__.update(getattr(parameter, "__dict__", {}))
    return new
