"""Tensors on devices: making them there, putting one of a module there, or all of a module for the length of a block.

Weights of bitsandbytes are numbers of 8 or 4 bits that mean nothing without the scales kept next to them. Their classes
are known by name, so that nothing here imports bitsandbytes. They quantise floating-point data when `to` moves them,
and keep the scales as attributes: `SCB` (8 bit) or `quant_state` (4 bit).
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.devices.table import detect
from accelerate.extensions.big_models.tensors import _get_proper_dtype, tensor_at
from accelerate.modules.offloaded import offloading_hook
from accelerate.runtime import storage, torch_private

Device = int | str | torch.device

INT8 = "Int8Params"
FOUR_BIT = ("Params4bit", "FP4Params")
_META = torch.device("meta")
# Attribute of a 4-bit weight: scales and shape that the numbers had before they came to their device.
_AT_REST = "accelerate_at_rest"
# Types of arguments that hold no tensors and have no `to`; others join when they are first seen.
_INERT: set[type] = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_EXACT: dict[Device, torch.device] = {}
# Tensors that are what their data is; the others have to be made by their class.
PLAIN = (nn.Parameter, torch.Tensor)


def as_device(device: Device) -> torch.device:
    """Return a device given by index, name or object; ValueError: no accelerator, or a name unknown to torch."""
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
    """Return a device of a map with the index that tensors on it tell, so that the two compare equal."""
    if (known := _EXACT.get(device)) is None:  # hooks ask at each forward
        found = as_device(device)
        indexed = found.index is not None or found.type in ("cpu", "meta")
        known = _EXACT[device] = found if indexed else torch.empty(0, device=found).device
    return known


def any_elsewhere(value: Any, device: torch.device) -> bool:
    """Return whether arguments of a forward may have to move to an `exact_device`; True for opaque values."""
    kind = type(value)
    if kind in _INERT:
        return False
    if isinstance(value, torch.Tensor):
        return value.device != device
    if kind is tuple or kind is list or kind is dict:
        for item in value.values() if kind is dict else value:  # noqa: SIM110 - a generator costs more than the look
            if any_elsewhere(item, device):
                return True
        return False
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
    """Return whether two devices are one; a device other than the CPU is without index the one with index 0.

    Args:
        first_device: A device.
        second_device: Another one.
    """
    if first_device.type != second_device.type:
        return False
    if first_device.type == "cpu":
        return first_device.index == second_device.index
    return (first_device.index or 0) == (second_device.index or 0)


def as_parameter(old: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """Make a value without gradient a parameter of the old one's class, with the old one's attributes."""
    trainable = old.requires_grad and (value.is_floating_point() or value.is_complex())
    kind = type(old)
    if (kind is nn.Parameter and type(value) in PLAIN) or (
        kind is not nn.Parameter and issubclass(kind, nn.Parameter) and type(value) in (*PLAIN, kind)
    ):
        # The class's own constructor may ask for arguments that are unknown here.
        parameter = torch_private.make_subclass(kind, value, trainable)
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
    owner, name = tensor_at(module, tensor_name) if "." in tensor_name else (module, tensor_name)
    table = owner._parameters if name in owner._parameters else owner._buffers
    old = table.get(name)
    if old is None:
        problem = "is registered as None in" if name in table else "is no parameter or buffer of"
        raise ValueError(f"{tensor_name!r} {problem} {type(owner).__name__}, so there is nothing to place.")
    target = device if type(device) is torch.device else as_device(device)
    to_meta = target.type == "meta"
    if value is None:
        if old.is_meta and not to_meta:
            raise ValueError(
                f"{tensor_name!r} is on the meta device and has no data: pass a `value` to put it on {target}."
            )
    elif old.shape != value.shape and type(old).__name__ not in FOUR_BIT:  # those are packed
        raise ValueError(
            f"The value for {tensor_name!r} has shape {tuple(value.shape)}, but the module has {tuple(old.shape)}. Check "
            "that the checkpoint belongs to this model."
        )
    key = None
    if tied_params_map is not None and not to_meta:
        key = (old if value is None else value).data_ptr()
        if key in tied_params_map and device in tied_params_map[key]:
            table[name] = tied_params_map[key][device]
            return
    if isinstance(dtype, str):
        dtype = _get_proper_dtype(dtype)
    if type(old) not in PLAIN and quantizes(old):
        same = value is None and fp16_statistics is None and is_settled(old, dtype)
        if same and check_device_same(old.device, target):
            new = old
        else:
            new = QuantizedWeight(owner, name, value, target, dtype, fp16_statistics, non_blocking).placed()
    else:
        new = _moved(old, value, target, dtype, table is owner._buffers, non_blocking)
        if fp16_statistics is not None:
            new.SCB = fp16_statistics.to(target)
    table[name] = new
    if key is not None and key in tied_params_map:
        tied_params_map[key][device] = new
    if clear_cache and not to_meta and target.type != "cpu":
        detect().empty_cache()


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
        source = source.detach()  # else the graph would have the copy
    if type(source) in PLAIN:
        moved = source.to(target, dtype, non_blocking)
    else:
        # `to` of a tensor subclass may take a cast and a move one at a time only.
        moved = (source if dtype is source.dtype else source.to(dtype)).to(target, non_blocking=non_blocking)
    if not is_buffer:
        return as_parameter(old, moved)
    return moved.detach() if moved.requires_grad or isinstance(moved, nn.Parameter) else moved


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


def scales_name(weight_name: str) -> str:
    """Return the name under which checkpoints hold the scales of an 8-bit weight."""
    return f"{weight_name.removesuffix('weight')}SCB"


def quantizes(parameter: torch.Tensor) -> bool:
    """Return whether a tensor is a weight of bitsandbytes that is quantised, or will be once it has data."""
    kind = type(parameter).__name__
    return kind in FOUR_BIT or (kind == INT8 and not getattr(parameter, "has_fp16_weights", False))


def is_settled(weight: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Return whether casting a weight of bitsandbytes (None: no cast) and placing it where it is changes nothing."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        return not _is_twisted(state)
    return weight.dtype is torch.int8 or (weight.is_meta and dtype in (None, weight.dtype))


@dataclass
class QuantizedWeight:
    """A weight of bitsandbytes, and what is to be put in its place.

    On the meta device a weight keeps its scales, which are small (8 bit: one number per row; 4 bit: one per block of
    64): numbers that come back later fit them, and the state dict is complete.

    Attributes:
        value: The new value: floating-point numbers, which are quantised, or quantised ones. None: the present weight.
        dtype: Floating-point numbers are cast to this before they are quantised. None: to the present weight's dtype.
        scales: Scales of an 8-bit value. None: those that the value, or else the present weight, has.
    """

    owner: nn.Module
    name: str
    value: torch.Tensor | None
    target: torch.device
    dtype: torch.dtype | None
    scales: torch.Tensor | None
    non_blocking: bool

    def placed(self) -> nn.Parameter:
        """Return the parameter to put there; ValueError: no scales or another shape; RuntimeError: not quantised."""
        self.old = getattr(self.owner, self.name)
        _take_scales_back(self.owner, self.old)
        self.source = self.old if self.value is None else self.value
        if type(self.old).__name__ == INT8:
            return self._int8()
        new = self._four_bit()
        if getattr(self.owner, "weight", None) is self.old and hasattr(self.owner, "quant_state"):
            self.owner.quant_state = new.quant_state  # else the layer holds on to the scales that were
        return new

    def _int8(self) -> nn.Parameter:
        if self.source.dtype is not torch.int8:
            # bitsandbytes quantises 8-bit weights on their way from the CPU, and only then.
            from_cpu = self.source.data.to(_META if self.target.type == "meta" else "cpu")
            return self._quantized(from_cpu, self.old.dtype is torch.int8, {"CB": None, "SCB": None})
        scales = self.scales
        if scales is None:
            own = getattr(self.source, "SCB", None)
            scales = self.old.SCB if own is None else own
        if self.target.type == "meta":
            return _remade(self.old, self.source.data.to(_META), {"CB": None, "SCB": scales})
        if scales is None:
            raise ValueError(
                f"The value for {self.name!r} is an 8-bit weight without its scales: pass them as `fp16_statistics` ('SCB' in "
                "checkpoints)."
            )
        data, scales = (one.to(self.target, non_blocking=self.non_blocking) for one in (self.source.data, scales))
        return _remade(self.old, data, {"CB": data, "SCB": scales})

    def _four_bit(self) -> nn.Parameter:
        old, source = self.old, self.source
        state = getattr(source, "quant_state", None)
        if state is None and not source.is_floating_point() or _is_packed_like(source, old):
            state = old.quant_state
            if state is None:
                raise ValueError(
                    f"The value for {self.name!r} is a packed 4-bit weight without its scales: give a Params4bit with "
                    "`quant_state`."
                )
        if state is not None:
            return self._packed(state)
        expected = (getattr(self.owner, "out_features", None), getattr(self.owner, "in_features", None))
        if None not in expected and tuple(source.shape) != expected:
            raise ValueError(
                f"The value for {self.name!r} has shape {tuple(source.shape)}, but the layer's weight has {expected}. Check "
                "that the checkpoint belongs to this model."
            )
        return self._quantized(source.data, old.quant_state is not None, {"quant_state": None, "bnb_quantized": False})

    def _quantized(self, data: torch.Tensor, was_quantized: bool, attributes: dict[str, Any]) -> nn.Parameter:
        """The weight made of floating-point numbers, which bitsandbytes quantises when they move."""
        dtype = self.old.dtype if self.dtype is None and not was_quantized else self.dtype
        made = _remade(self.old, data if dtype is None else data.to(dtype), attributes)
        if self.target.type == "meta":
            return _remade(made, made.data.to(_META), {})
        made = made.to(self.target, non_blocking=self.non_blocking)
        if made.dtype is not torch.int8 and getattr(made, "quant_state", None) is None:
            import bitsandbytes

            raise RuntimeError(
                f"bitsandbytes {bitsandbytes.__version__} did not quantise a {type(made).__name__} on {self.target}. Install a "
                "newer one (`pip install -U bitsandbytes`), or use a device that this one supports."
            )
        return made

    def _packed(self, state: Any) -> nn.Parameter:
        """A quantised weight. A first forward on some CPUs repacks numbers and scales, so a device gets scales of its
        own, and the meta device those of the numbers that the weight was filled from.
        """
        source = self.source
        if self.target.type == "meta":
            at_rest, shape = source.__dict__.get(_AT_REST) or (_copied(state), source.shape)
            empty = torch.empty(shape, dtype=source.dtype, device="meta")
            made = _remade(self.old, empty, {"quant_state": at_rest})
        else:
            own = _copied(state)
            own.to(self.target)
            data = source.data.to(self.target, non_blocking=self.non_blocking)
            made = _remade(self.old, data, {"quant_state": own})
            if source is not self.old:
                setattr(made, _AT_REST, (state, source.shape))
        made.bnb_quantized = True
        return made


def _take_scales_back(owner: nn.Module, weight: torch.Tensor) -> None:
    """Undo that an 8-bit layer's first forward moves scales to the layer, which would keep the numbers too."""
    state = getattr(owner, "state", None)
    if type(weight).__name__ != INT8 or getattr(owner, "weight", None) is not weight or not hasattr(state, "SCB"):
        return
    if state.SCB is not None and weight.SCB is None:
        weight.CB, weight.SCB = weight.data, state.SCB
    state.CB = state.SCB = None


def _remade(old: nn.Parameter, data: torch.Tensor, attributes: dict[str, Any]) -> nn.Parameter:
    made = torch_private.make_subclass(type(old), data.detach(), False)
    made.__dict__.update({**old.__dict__, **attributes})
    made.__dict__.pop(_AT_REST, None)
    return made


def _is_packed_like(source: torch.Tensor, old: nn.Parameter) -> bool:
    """Whether plain numbers are packed as the present weight's are; their dtype may be a floating-point one (quant_storage)."""
    same = source.shape == old.shape and source.dtype is old.dtype
    return same and type(source).__name__ not in FOUR_BIT and old.quant_state is not None


def _copied(state: Any) -> Any:
    """Scales that may be moved and packed, both of which bitsandbytes does in place."""
    copied = copy.copy(state)
    if getattr(copied, "state2", None) is not None:
        copied.state2 = copy.copy(copied.state2)
    if _is_twisted(copied):
        copied.absmax = copied.absmax.T.reshape(-1).float()
    return copied


def _is_twisted(state: Any) -> bool:
    """Whether bitsandbytes (up to 0.50.2) unpacked a weight packed for a CPU and left its scales transposed."""
    return state.absmax.dim() == 2 and not getattr(state, "packing_format_for_cpu", False)
