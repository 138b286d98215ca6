"""How much memory devices have for a model, and how to spread a model evenly over them."""

import logging
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.devices.probe import detect
from accelerate.offload.sizes import class_names, compute_module_sizes, convert_file_size_to_int, get_module_leaves

logger = logging.getLogger("accelerate.utils.modeling")

# The reserve per device in a balanced split, as a factor of the larger of: a whole block, an average leaf.
_BALANCE_MARGIN = 1.25


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
