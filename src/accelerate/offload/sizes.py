"""How many bytes dtypes, tensors, modules and the largest layer take, and how much memory devices have for them."""

import logging
import numbers
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.config.enums import CustomDtype
from accelerate.devices.probe import detect
from accelerate.offload.tensors import named_module_tensors

logger = logging.getLogger("accelerate.utils.modeling")

_BITS_PER_BYTE = 8
_UNITS = {"GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3}
# The reserve per device in a balanced split, as a factor of the larger of: a whole block, an average leaf.
_BALANCE_MARGIN = 1.25
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
        re.fullmatch(r"\s*(\d[\d_]*(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*([KMG]i?b)\s*", size, re.IGNORECASE)
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
    found = _torch_dtype(dtype)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={dtype!r} names no torch dtype. Use a name such as 'float16' or 'bfloat16'.")
    return found


def _torch_dtype(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."), None)


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _bytes_per_element(
    own: torch.dtype, dtype: torch.dtype | CustomDtype | None, exact: torch.dtype | CustomDtype | str | None
) -> int | float:
    """Bytes of one element once loaded: a cast shrinks floating-point tensors, never enlarges them."""
    if exact is not None:
        return dtype_byte_size(exact)
    size = dtype_byte_size(own)
    return size if dtype is None or _is_integral(own) else min(dtype_byte_size(dtype), size)


def _checked_dtypes(
    dtype: Any, special_dtypes: Mapping[str, Any] | None
) -> tuple[torch.dtype | CustomDtype | None, dict[str, torch.dtype | CustomDtype]]:
    special: dict[str, torch.dtype | CustomDtype] = {}
    named = {"dtype": dtype} if dtype is not None else {}
    for name, exact in (special_dtypes or {}).items():
        named[f"special_dtypes[{name!r}]"] = special[name] = exact
    for argument, given in named.items():
        known = isinstance(given, torch.dtype | CustomDtype)
        if not known and not (isinstance(given, str) and isinstance(_torch_dtype(given), torch.dtype)):
            raise ValueError(
                f"{argument}={given!r} is no torch dtype. Use torch.float16, the name 'float16', or a CustomDtype."
            )
    return _get_proper_dtype(dtype), {name: _get_proper_dtype(exact) for name, exact in special.items()}


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
        special_dtypes: Exact dtypes for some tensors, by full name. Names that the model does not have are allowed.
        buffers_only: Leave the parameters out.

    Returns:
        Full name to bytes; ``""`` is the whole model. Names without tensors answer 0.

    Raises:
        ValueError: A dtype is none.

    Example:
        >>> compute_module_sizes(nn.Linear(3, 4))["weight"]
        48
    """
    wanted, special = _checked_dtypes(dtype, special_dtypes)
    tensors: Iterable[tuple[str, torch.Tensor]]
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    sizes: dict[str, int] = defaultdict(int)
    per_element: dict[torch.dtype, int | float] = {}
    outer: dict[str, list[str]] = {}
    for name, tensor in tensors:
        own = tensor.dtype
        if own not in per_element:
            per_element[own] = _bytes_per_element(own, wanted, None)
        exact = special.get(name)
        size = tensor.numel() * (per_element[own] if exact is None else _bytes_per_element(own, wanted, exact))
        path = name.rpartition(".")[0]
        if path not in outer:
            parts = path.split(".") if path else []
            outer[path] = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
        for module in outer[path]:
            sizes[module] += size
        sizes[name] += size
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
) -> int:
    """Return the bytes of all buffers of a model; the arguments are those of `compute_module_sizes`."""
    return compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True).get("", 0)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names that no other name in the mapping lies right below; the whole model, ``""``, is never one of them.

    Args:
        module_sizes: As `compute_module_sizes` returns it, or a part of it.
    """
    inner = {"", *(name.rpartition(".")[0] for name in module_sizes)}
    return [name for name in module_sizes if name not in inner]


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str] | str | None,
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer, that is, of the largest unit that has to be on a device at once.

    Args:
        modules: Names with modules, parameters or buffers, as the queue of `infer_auto_device_map` holds them.
        module_sizes: As `compute_module_sizes` returns it.
        no_split_module_classes: Names of classes that count as one layer although they have children.

    Returns:
        The size in bytes, and the names of all layers that have it.
    """
    whole = class_names(no_split_module_classes)
    largest, names = 0, []
    pending = list(modules)[::-1]
    while pending:
        name, item = pending.pop()
        if not is_whole(item, whole):
            prefix = f"{name}." if name else ""
            pending += [(prefix + child_name, child) for child_name, child in reversed(list(item.named_children()))]
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def class_names(classes: Iterable[str | type] | str | None, argument: str = "no_split_module_classes") -> set[str]:
    """Return names of classes as a set.

    Args:
        classes: Names, or classes themselves, or one name.
        argument: What error messages call it.

    Raises:
        ValueError: Something else was given.

    Example:
        >>> class_names("Block")
        {'Block'}
    """
    given = [classes] if isinstance(classes, str | type) else classes
    if given is None:
        return set()
    found = list(given) if isinstance(given, Iterable) else [given]
    wrong = [entry for entry in found if not isinstance(entry, str | type)]
    if wrong:
        raise ValueError(f"{argument} holds {wrong[0]!r}, which is no class name. Give names such as ['Block'].")
    return {entry.__name__ if isinstance(entry, type) else entry for entry in found}


def is_whole(item: nn.Module | torch.Tensor, no_split: Collection[str]) -> bool:
    """Say whether an item goes to one device as it is: a tensor, a module without submodules, or one of some classes.

    Args:
        item: A module or tensor.
        no_split: Names of classes that must not be split.
    """
    if not isinstance(item, nn.Module) or type(item).__name__ in no_split:
        return True
    return next(item.children(), None) is None


def format_bytes(size: int | float) -> str:
    """Return a size for people, with binary units.

    Args:
        size: A number of bytes.

    Example:
        >>> format_bytes(3 * 2**29)
        '1.50 GiB'
    """
    for unit in ("GiB", "MiB", "KiB"):
        if abs(size) >= _UNITS[unit.upper()]:
            return f"{size / _UNITS[unit.upper()]:.2f} {unit}"
    return f"{size:g} bytes"


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of a whole model and of its largest layer.

    Args:
        model: The model; classes in its ``_no_split_modules`` (transformers) count as one layer.

    Returns:
        ``(total, (largest, names of the layers that are that large))``.
    """
    sizes = compute_module_sizes(model)
    whole = getattr(model, "_no_split_modules", None)
    direct = [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]
    return sizes.get("", 0), get_max_layer_size(direct, sizes, whole)


def _detected_memory() -> dict[int | str, int]:
    import psutil  # read here alone, and slow to import

    device = detect()
    free: dict[int | str, int] = {}
    if device.type == "mps":
        return {"mps": psutil.virtual_memory().available}
    for index in range(device.count()) if device.type != "cpu" else ():
        try:
            free[index] = device.namespace().mem_get_info(index)[0]
        except Exception as error:  # a device may be taken by another process, or be too old for this torch
            logger.info("Device %s:%d is left out of the memory budget: %s", device.type, index, error)
    free["cpu"] = psutil.virtual_memory().available
    return free


def _warn_of_missing_devices(indices: Sequence[int]) -> None:
    device = detect()
    available = range(device.count()) if device.type not in ("cpu", "mps") else range(0)
    missing = [str(index) for index in indices if index not in available]
    if missing:
        logger.warning(
            "Device%s %s of max_memory %s not available; available devices are %s.",
            "s" * (len(missing) > 1),
            ", ".join(missing),
            "are" if len(missing) > 1 else "is",
            list(available),
        )


def _bytes_of(device: Any, budget: Any) -> int | float:
    """Read one budget. Numbers stay as they are: transformers computes budgets as floats."""
    try:
        if not isinstance(budget, str) and isinstance(budget, numbers.Real) and budget >= 0:
            return budget
        return convert_file_size_to_int(budget)
    except ValueError as error:
        raise ValueError(
            f"max_memory[{device!r}]={budget!r} is not a size. Give a number of bytes (at least 0) or text with a unit, "
            "such as '5GB' or '512MiB'."
        ) from error


def _ordered_budgets(max_memory: Mapping[int | str, int | str]) -> dict[int | str, int]:
    if not isinstance(max_memory, Mapping):
        raise ValueError(
            f"max_memory={max_memory!r} is no mapping. Give a budget per device, such as {{0: '10GiB', 'cpu': '30GiB'}}."
        )
    indices = sorted(device for device in max_memory if isinstance(device, int))
    order: list[int | str] = [*indices, *(name for name in ("mps", "cpu", "disk") if name in max_memory)]
    unknown = [device for device in max_memory if device not in order]
    if unknown:
        raise ValueError(
            f"max_memory names the device {unknown[0]!r}; devices are accelerator indices (int), 'mps', 'cpu' and 'disk'."
        )
    return {device: _bytes_of(device, max_memory[device]) for device in order}


def get_max_memory(max_memory: Mapping[int | str, int | str] | None = None) -> dict[int | str, int]:
    """Return the memory budget of each device in bytes, ordered by the sequence in which devices get filled.

    A line of warning names the accelerators that this machine does not have.

    Args:
        max_memory: Device to budget; accelerators by index, others as ``"mps"``, ``"cpu"``, ``"disk"``. Budgets are
            bytes, or text as `convert_file_size_to_int` reads it. Devices not named get nothing. None: the free memory
            of every accelerator, and of the host.

    Raises:
        ValueError: A key is no such device, or a budget is not a size.

    Example:
        >>> get_max_memory({"cpu": "1GB", "disk": 10})
        {'cpu': 1000000000, 'disk': 10}
    """
    if max_memory is None:
        return _detected_memory()
    budgets = _ordered_budgets(max_memory)
    _warn_of_missing_devices([device for device in budgets if isinstance(device, int)])
    return budgets


def _margin(model: nn.Module, sizes: Mapping[str, int], no_split: Collection[str]) -> int:
    """Bytes by which one device may exceed its even share, since blocks are placed whole."""
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    leaves = get_module_leaves(modules)
    mean_leaf = int(sum(modules[name] for name in leaves) / max(len(leaves), 1))
    blocks: dict[str, int] = {}
    for name in modules:
        if name:
            kind = type(model.get_submodule(name)).__name__
            if kind in no_split and kind not in blocks:
                blocks[kind] = modules[name]
    return int(_BALANCE_MARGIN * max(max(blocks.values(), default=0), mean_leaf))


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Return a memory budget that spreads a model evenly over the accelerators, for `infer_auto_device_map`.

    The last accelerator keeps its whole budget, for what the even shares do not hold.

    Args:
        model: The model; its tensors may be on the meta device.
        max_memory: The most that may be used, as for `get_max_memory`.
        no_split_module_classes: Names of classes whose instances stay on one device.
        dtype: Dtype that the weights will be cast to.
        special_dtypes: Exact dtypes for some tensors, by full name.
        low_zero: Leave as much as possible of accelerator 0, or the first one there is, free (for generation, whose outputs
            gather there).

    Returns:
        Device to bytes, as `get_max_memory` returns it.

    Raises:
        ValueError: A budget, class or dtype is none; the message names it.
    """
    user_set = max_memory is not None
    # Devices that are not there are warned about when the budgets are used.
    budgets = _ordered_budgets(max_memory) if user_set else get_max_memory()
    accelerators = [device for device in budgets if device not in ("cpu", "disk") and budgets[device] > 0]
    if not accelerators or "mps" in accelerators:
        return budgets
    if len(accelerators) == 1:
        low_zero = False
        if not user_set:
            # Activations need room on the only accelerator, and nobody said how much.
            budgets[accelerators[0]] = int(budgets[accelerators[0]] * 0.9)
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    total = sizes.get("", 0)
    no_split = class_names(no_split_module_classes)
    share = total // (len(accelerators) - low_zero) + _margin(model, sizes, no_split)
    low = (0 if 0 in budgets else accelerators[0]) if low_zero else None
    for device in accelerators[:-1]:
        if device != low:
            budgets[device] = min(share, budgets[device])
    if low in accelerators:
        others = sum(budgets[device] for device in accelerators if device != low)
        budgets[low] = min(max(0, total - others), budgets[low])
    return budgets
