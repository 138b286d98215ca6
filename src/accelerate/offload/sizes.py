"""How many bytes dtypes, tensors, modules and the largest layer take."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.config.enums import CustomDtype
from accelerate.offload.tensors import named_module_tensors

_BITS_PER_BYTE = 8
_UNITS = {"GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3}
_CUSTOM_BYTES = {"fp8": 1, "int4": 1 / 2, "int2": 1 / 4}


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size written with a unit as a number of bytes.

    Args:
        size: A number of bytes, or text such as ``"5GB"``, ``"500 MiB"``. ``KiB``, ``MiB``, ``GiB`` count in powers of
            1024; ``KB``, ``MB``, ``GB`` in powers of 1000. Case does not matter, except for a final lower-case ``b``
            after an upper-case or lower-case prefix, which means bits.

    Raises:
        ValueError: The size is negative or not written like that.

    Example:
        >>> convert_file_size_to_int("1MiB")
        1048576
    """
    problem = ValueError(
        f"size={size!r} is not a size. Give a number of bytes (an int of at least 0) or text with a unit, "
        f"such as '5GB' or '512MiB'; the units are {', '.join(unit.replace('I', 'i') for unit in _UNITS)}."
    )
    if isinstance(size, int):
        if size < 0:
            raise problem
        return size
    parts = (
        re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMG]i?b)\s*", size, re.IGNORECASE)
        if isinstance(size, str)
        else None
    )
    if parts is None:
        raise problem
    number, unit = parts.groups()
    count = float(number) * _UNITS[unit.upper()]
    in_bits = unit.endswith("b") and "i" not in unit.lower()
    return int(count // _BITS_PER_BYTE) if in_bits else int(count)


def dtype_byte_size(dtype: torch.dtype | CustomDtype | str) -> int | float:
    """Return the bytes that one element of a dtype takes; less than 1 for packed dtypes.

    Args:
        dtype: A torch dtype, its name, or a `CustomDtype` of a quantised model. ``torch.bool`` counts as one bit,
            which is what quantised formats pack it to.

    Raises:
        ValueError: It is none of these.

    Example:
        >>> dtype_byte_size(torch.bfloat16)
        2
    """
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype.value]
    plain = _get_proper_dtype(dtype)
    if plain is torch.bool:
        return 1 / _BITS_PER_BYTE
    if not isinstance(plain, torch.dtype):
        raise ValueError(f"dtype={dtype!r} is not a torch.dtype, the name of one, or a CustomDtype.")
    return plain.itemsize


def _get_proper_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype given by name (``"float16"``, ``"torch.float16"``) as the torch dtype; anything else unchanged.

    Raises:
        ValueError: torch has no dtype of that name.
    """
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={dtype!r} names no torch dtype. Use a name such as 'float16' or 'bfloat16'.")
    return found


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _tensor_bytes(
    name: str, tensor: torch.Tensor, dtype: torch.dtype | CustomDtype | None, special: Mapping[str, Any]
) -> int | float:
    """Size of one tensor once loaded: a cast shrinks floating-point tensors, never enlarges them."""
    own = dtype_byte_size(tensor.dtype)
    if name in special:
        per_element = dtype_byte_size(special[name])
    elif dtype is None or _is_integral(tensor.dtype):
        per_element = own
    else:
        per_element = min(dtype_byte_size(dtype), own)
    return tensor.numel() * per_element


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every tensor of a model and of every module that holds some.

    Tied parameters count once, under the name that comes first.

    Args:
        model: The model; its tensors may be on the meta device.
        dtype: Count as if floating-point tensors were cast to this dtype, where that makes them smaller.
        special_dtypes: Exact dtypes for some tensors, by full name.
        buffers_only: Leave the parameters out.

    Returns:
        Full name to bytes; ``""`` is the whole model. Names without tensors answer 0.

    Example:
        >>> compute_module_sizes(nn.Linear(3, 4))["weight"]
        48
    """
    wanted = _get_proper_dtype(dtype)
    special = dict(special_dtypes or {})
    tensors: Iterable[tuple[str, torch.Tensor]]
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in tensors:
        size = _tensor_bytes(name, tensor, wanted, special)
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += size
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
) -> int:
    """Return the bytes of all buffers of a model; the arguments are those of `compute_module_sizes`."""
    return compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True).get("", 0)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names that no other name in the mapping lies below.

    Args:
        module_sizes: As `compute_module_sizes` returns it, or a part of it.
    """
    inner = {name.rpartition(".")[0] for name in module_sizes if name}
    for name in list(inner):
        while name:
            name = name.rpartition(".")[0]
            inner.add(name)
    return [name for name in module_sizes if name not in inner]


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str] | None,
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer, that is, of the largest unit that has to be on a device at once.

    Args:
        modules: Names with modules, parameters or buffers, as the queue of `infer_auto_device_map` holds them.
        module_sizes: As `compute_module_sizes` returns it.
        no_split_module_classes: Names of classes that count as one layer although they have children.

    Returns:
        The size in bytes, and the names of all layers that have it.
    """
    whole = set(no_split_module_classes or ())
    largest, names = 0, []
    pending = list(modules)
    while pending:
        name, item = pending.pop(0)
        children = list(item.named_children()) if isinstance(item, nn.Module) else []
        if children and type(item).__name__ not in whole:
            pending = [
                (f"{name}.{child_name}" if name else child_name, child) for child_name, child in children
            ] + pending
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of a whole model and of its largest layer.

    Args:
        model: The model; classes in its ``_no_split_modules`` (transformers) count as one layer.

    Returns:
        ``(total, (largest, names of the layers that are that large))``.
    """
    sizes = compute_module_sizes(model)
    whole = getattr(model, "_no_split_modules", None) or []
    direct = [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]
    return sizes.get("", 0), get_max_layer_size(direct, sizes, list(whole))
