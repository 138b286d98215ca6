"""Putting one tensor of a module onto a device, and a module's tensors for the length of a block."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accelerate.devices.probe import detect
from accelerate.offload.tensors import named_module_tensors, tensor_at
from accelerate.runtime import storage

Device = int | str | torch.device

# bitsandbytes layers by class name, with the attribute that their weight has once it is quantised. bitsandbytes
# quantises when the weight moves to the accelerator.
_QUANTIZED_BY_MOVING = {"Linear8bitLt": "SCB", "Linear4bit": "quant_state"}
_QUANTIZED_PARAMETERS = ("Int8Params", "Params4bit", "FP4Params")


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


def default_device() -> torch.device:
    """Return the device that this process computes on; the accelerator's current one, if there is no state yet."""
    device = storage.process.current.get("device")
    if device is not None:
        return device
    kind = detect()
    return torch.device("cpu") if kind.type == "cpu" else kind.current()


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Say whether two devices are one; an accelerator without index is the one with index 0.

    Args:
        first_device: A device.
        second_device: Another one.
    """
    if first_device.type != second_device.type:
        return False
    if first_device.type in ("cpu", "meta"):
        return first_device.index == second_device.index
    return (first_device.index or 0) == (second_device.index or 0)


def _cast(value: torch.Tensor, old: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A new value takes the place's dtype; an explicit dtype applies to floating-point values only."""
    if dtype is None:
        return value.to(old.dtype)
    return value.to(dtype) if value.dtype.is_floating_point or value.dtype.is_complex else value


def _as_parameter(old: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """Make a value a parameter of the old one's class, with the old one's attributes."""
    trainable = old.requires_grad and (value.dtype.is_floating_point or value.dtype.is_complex)
    kind = type(old)
    if (
        kind is nn.Parameter
        or not issubclass(kind, nn.Parameter)
        or type(value) not in (torch.Tensor, nn.Parameter, kind)
    ):
        # nn.Parameter() keeps tensor subclasses (torchao, quanto) what they are.
        parameter = nn.Parameter(value.detach(), requires_grad=trainable)
    else:
        # The class's own constructor may ask for arguments that nobody here knows.
        parameter = torch.Tensor._make_subclass(kind, value.detach(), trainable)
    for name, attribute in getattr(old, "__dict__", {}).items():
        parameter.__dict__.setdefault(name, attribute)
    return parameter


def _quantize_when_complete(owner: nn.Module, device: torch.device) -> None:
    state = _QUANTIZED_BY_MOVING.get(type(owner).__name__)
    if state is None or device.type in ("cpu", "meta") or getattr(owner.weight, state, None) is not None:
        return
    if owner.weight.device.type != "meta" and (owner.bias is None or owner.bias.device.type != "meta"):
        owner.to(device)


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
        fp16_statistics: Scales of an 8-bit weight of bitsandbytes, stored as its ``SCB``.
        tied_params_map: ``data_ptr`` of a shared weight -> device -> its copy there. A weight found in it is reused
            instead of copied again; an entry without this device receives the copy.
        non_blocking: Let the copy overlap with computation where memory is pinned.
        clear_cache: Give freed accelerator memory back to the driver afterwards.

    Raises:
        AttributeError: A module in the name does not exist.
        ValueError: The tensor does not exist, the shape differs, or data is wanted of a meta tensor.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> set_module_tensor_to_device(layer, "weight", "meta")
        >>> set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2))
    """
    owner, name = tensor_at(module, tensor_name)
    table = owner._parameters if name in owner._parameters else owner._buffers
    if name not in table:
        raise ValueError(f"{type(owner).__name__} has no parameter or buffer named {name!r} (of {tensor_name!r}).")
    old = table[name]
    target = as_device(device)
    if old is None:
        raise ValueError(
            f"{tensor_name!r} is registered as None in {type(owner).__name__}, so there is nothing to place."
        )
    _check_value(tensor_name, old, value, target)

    key = None
    if tied_params_map is not None and target.type != "meta":
        key = (old if value is None else value).data_ptr()
        if key in tied_params_map and device in tied_params_map[key]:
            table[name] = tied_params_map[key][device]
            return
    dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    wanted = old if value is None else _cast(value, old, dtype)
    if value is None and dtype is not None:
        wanted = _cast(old, old, dtype)
    if wanted is old and check_device_same(old.device, target):
        new = old
    else:
        with torch.no_grad():
            new = _moved(old, wanted, target, is_buffer=table is owner._buffers, non_blocking=non_blocking)
        table[name] = new
    if fp16_statistics is not None:
        table[name].SCB = fp16_statistics.to(target)
    if key is not None and key in tied_params_map:
        tied_params_map[key][device] = new
    _quantize_when_complete(owner, target)
    if clear_cache and target.type not in ("cpu", "meta"):
        detect().empty_cache()


def _check_value(name: str, old: torch.Tensor, value: torch.Tensor | None, target: torch.device) -> None:
    if value is None:
        if old.device.type == "meta" and target.type != "meta":
            raise ValueError(f"{name!r} is on the meta device and has no data: pass a `value` to put it on {target}.")
    # A 4-bit weight is packed: its shape says nothing about the layer's.
    elif old.shape != value.shape and type(old).__name__ not in ("Params4bit", "FP4Params"):
        raise ValueError(
            f"The value for {name!r} has shape {tuple(value.shape)}, but the module has {tuple(old.shape)}. Check that "
            "the checkpoint belongs to this model."
        )


def _moved(
    old: torch.Tensor, wanted: torch.Tensor, target: torch.device, is_buffer: bool, non_blocking: bool
) -> torch.Tensor:
    if is_buffer:
        return wanted.detach().to(target, non_blocking=non_blocking)
    if type(old).__name__ in _QUANTIZED_PARAMETERS:
        # The parameter itself has to travel, because its `to` is what quantises.
        return _as_parameter(old, wanted).to(target, non_blocking=non_blocking)
    return _as_parameter(old, wanted.to(target, non_blocking=non_blocking))


def _offloading_hook(module: nn.Module) -> Any | None:
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
    return hook is not None and _offloading_hook(module) is hook


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
    hook = _offloading_hook(module)
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
        originals = dict(named_module_tensors(module))
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
