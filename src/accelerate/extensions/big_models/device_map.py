"""Deciding which module goes to which device and how much each may hold, and checking such a decision."""

import logging
import numbers
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.base.text import convert_bytes, convert_file_size_to_int
from accelerate.devices.table import detect, row
from accelerate.extensions.big_models.placement import Device, as_device
from accelerate.extensions.big_models.planner import Planner, Ties, fitting, make_plan, parts
from accelerate.extensions.big_models.tensors import (
    check_tied_parameters_in_config,
    class_names,
    compute_module_sizes,
    entry_of,
    find_tied_parameters,
    get_module_leaves,
    name_and_parents,
)

logger = logging.getLogger("accelerate.utils.modeling")

Item = tuple[str, nn.Module | torch.Tensor]

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
# The reserve per device in a balanced split, as a factor of the larger of: a whole block, an average leaf.
_BALANCE_MARGIN = 1.25


def fallback_allocate(
    modules: list[Item],
    module_sizes: Mapping[str, int],
    size_limit: int | float,
    no_split_module_classes: Sequence[str] | str | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | torch.Tensor | None, list[Item]]:
    """Find the first module, however deep, that fits into a limit, for a device that would otherwise stay empty.

    Args:
        modules: Names and modules that wait for a device; the list stays as it is.
        module_sizes: As `compute_module_sizes` returns it.
        size_limit: Bytes that the module may take, modules tied to it included.
        no_split_module_classes: Names of classes whose instances stay whole.
        tied_parameters: As `find_tied_parameters` returns it.

    Returns:
        Name and module, or None twice, and what waits then: the modules around the one found, opened up.
    """
    names = {name for name, _ in modules}
    ties, no_split = Ties(tied_parameters or ()), class_names(no_split_module_classes)
    found = fitting(modules, module_sizes, size_limit, no_split, ties, lambda tensor: entry_of(tensor, names))
    path = next(found, None)
    if path is None:
        return None, None, list(modules)
    waiting = list(modules)
    for name in path:
        position = next(index for index, (other, _) in enumerate(waiting) if other == name)
        _, module = waiting.pop(position)
        waiting[position:position] = parts(name, module) if name != path[-1] else []
    return path[-1], module, waiting


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Return a device map that fills accelerators first, then the host memory, then the disk.

    Modules go in the order in which they are registered. The first accelerator (and the host memory) keep room for the
    largest layer, because offloaded layers run there. Modules with tied weights go to one device. A device that stays
    empty because its budget is too small is warned about.

    Not a collective.

    Args:
        model: The model; its tensors may be on the meta device. Tie its weights first.
        max_memory: The most that each device may take, as for `get_max_memory`. None: what is free.
        no_split_module_classes: Names of classes whose instances stay on one device, such as a block with a residual
            connection.
        dtype: Dtype that the weights will be cast to.
        special_dtypes: Exact dtypes for some tensors, by full name.
        verbose: Print each decision: what goes where, what did not fit, and why.
        clean_result: Replace the children of a module by the module where all are on one device.
        offload_buffers: The buffers of offloaded layers will be offloaded as well.
        fallback_allocation: Where the next module is too large for an empty device, look for one deeper that is not.

    Returns:
        Module (or tensor) name to accelerator index, ``"cpu"`` or ``"disk"``.

    Raises:
        ValueError: A budget, class or dtype is none; the message names it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        >>> dict(infer_auto_device_map(model, max_memory={"cpu": 160}))
        {'0': 'cpu', '1': 'disk', '2': 'disk'}
    """
    budgets, no_split = get_max_memory(max_memory), class_names(no_split_module_classes)
    dtypes = {"dtype": dtype, "special_dtypes": special_dtypes}
    options = {"offload_buffers": offload_buffers, "fallback": fallback_allocation, "verbose": verbose}
    plan = make_plan(model, budgets, no_split=no_split, dtypes=dtypes, **options)
    if not plan.ties.groups and check_tied_parameters_in_config(model):
        logger.warning(
            "The model weights are not tied, although its configuration says that they should be. Call "
            "`model.tie_weights()` before `infer_auto_device_map`, or tied layers may land on different devices."
        )
    _warn_of_buffers(plan)
    _warn_of_empty_devices(plan)
    found = OrderedDict(plan.placed)
    return clean_device_map(found) if clean_result else found


def _warn_of_buffers(plan: Planner) -> None:
    accelerators = [device for device in plan.devices if device not in ("cpu", "disk")]
    free = [plan.budgets[device] - plan.used[device] - plan.kept.get(device, 0) for device in accelerators]
    if free and plan.buffers > max(0, *free):
        warnings.warn(
            f"The offloaded layers have {plan.buffers} bytes of buffers, which stay on the device that runs them, and "
            "that fits the remaining memory of none. If memory runs out, pass `offload_buffers=True`.",
            stacklevel=3,
        )


def _warn_of_empty_devices(plan: Planner) -> None:
    """A budget of nothing is a wish; one that holds nothing is a mistake."""
    lines = [
        f"\n  - {device}: {size + reserve} bytes required ({size} for {name!r}, {reserve} kept free "
        f"for the largest layer), the budget is {plan.budgets[device]} ({convert_bytes(plan.budgets[device])})"
        for device, (name, size, reserve) in plan.refused.items()
        if plan.budgets[device] and not plan.used[device]
    ]
    if lines:
        logger.warning(
            "These devices have too little memory for the next module and stay empty in this device map. Give them more, or let "
            "`fallback_allocation=True` look for smaller modules:%s",
            "".join(lines),
        )


def clean_device_map(device_map: dict[str, int | str], module_name: str = "") -> dict[str, int | str]:
    """Replace the entries below a module by one for the module, wherever they name one device only.

    Args:
        device_map: Module names to devices; changed in place.
        module_name: Where in the model to begin.

    Returns:
        The same dict.

    Example:
        >>> clean_device_map({"a.b": 0, "a.c": 0, "d": "cpu"})
        {'d': 'cpu', 'a': 0}
    """
    inside: dict[str, list[str]] = {}  # module -> entries in it; outer modules come first
    for entry in device_map:
        for name in ("", *reversed(list(name_and_parents(entry.rpartition(".")[0])))):
            inside.setdefault(name, []).append(entry)
    for name, entries in inside.items():
        is_below = not module_name or f"{name}.".startswith(f"{module_name}.")
        devices = {device_map.get(entry) for entry in entries}  # of none where an outer module has taken the place
        if is_below and len(entries) > 1 and len(devices) == 1 and entries[0] in device_map:
            for entry in entries:
                device = device_map.pop(entry)
            device_map[name] = device
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a device map covers every tensor of a model, and warn about entries that match nothing.

    Args:
        model: The model to be dispatched.
        device_map: Module or tensor names to devices.

    Raises:
        ValueError: Tensors have no device; the message names them.

    Example:
        >>> from accelerate.utils import check_device_map
        >>> check_device_map(torch.nn.Sequential(torch.nn.Linear(1, 1)), {"0": "cpu"})  # raises if a weight has no device
    """
    tensors = list(model.state_dict(keep_vars=True))  # non-persistent buffers go where their module goes
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}.union(tensors)
    known.update(name for name, _ in model.named_buffers(remove_duplicate=False))
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warnings.warn(f"These device_map keys match no module or tensor of the model: {unknown}", stacklevel=2)
    missing = [tensor for tensor in tensors if entry_of(tensor, device_map) is None]
    if missing:
        raise ValueError(
            f"The device_map provided gives no device to these tensors: {', '.join(missing)}. Add them, a module that "
            "holds them, or '' for the rest of the model."
        )


def check_devices(device_map: Mapping[str, Any]) -> None:
    """Raise a ValueError for a device of a map that this machine does not have; ``"disk"`` is none."""
    for device in dict.fromkeys(device for device in device_map.values() if device != "disk"):
        found = as_device(device)
        if found.type in ("cpu", "meta"):
            continue
        kind = row(found.type)
        count = kind.count() if kind.available() else 0
        if (found.index or 0) >= count:
            module = next(name for name, value in device_map.items() if value == device)
            raise ValueError(
                f"The device_map puts {module or 'the model'!r} on {device!r}, but this machine has {count} {found.type} "
                "devices. Use 'cpu' or 'disk', or device_map='auto'."
            )


def disjoint_map(model: nn.Module, device_map: Mapping[str, Device]) -> dict[str, Device]:
    """Return a device map that says the same with entries none of which lies below another; a copy where none does.

    The longest entry that a tensor lies under decides: ``{"": "cpu", "head": "disk"}`` is everything but the head on
    the CPU. A module with several names is where the first of them is.
    """
    first = {id(module): name for name, module in model.named_modules()}
    named = list(model.named_modules(remove_duplicate=False))
    nested = any(part in device_map for name in device_map for part in (*name_and_parents(name), "") if part != name)
    if not nested and len(named) == len(first):
        return dict(device_map)
    places: dict[str, Device] = {}
    for name, module in named:
        known, prefix = first[id(module)], f"{name}." if name else ""
        for last, tensor in (*module._parameters.items(), *module._buffers.items()):
            entry = entry_of(f"{known}.{last}".lstrip("."), device_map)
            if tensor is not None and entry is not None:
                places[prefix + last] = device_map[entry]
    return clean_device_map(places)


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
            logger.info("Device %s:%d is omitted of the memory budget: %s", device.type, index, error)
    free["cpu"] = psutil.virtual_memory().available
    return free


def _bytes_of(device: Any, budget: Any) -> int | float:
    """Read one budget. Numbers stay as they are: transformers computes budgets as floats."""
    if isinstance(budget, numbers.Real) and budget >= 0:
        return budget
    try:
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


def _init_infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
) -> tuple[list[Any], dict[Any, int], list[Any], list[int], dict[str, int], list[list[str]], list[str], list[Item]]:
    """Return what `infer_auto_device_map` begins with, for programs that place modules themselves.

    Returns:
        Devices in the order in which they are filled, budgets, the devices that keep room for the largest layer,
        accelerators, module sizes, names of tied parameters, classes that stay together, and what is to be placed.
    """
    budgets = get_max_memory(max_memory)
    devices = [*budgets, *(() if "disk" in budgets else ("disk",))]
    accelerators = [device for device in devices if device not in ("cpu", "disk")]
    main = [*accelerators[:1], "cpu"]
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    tied = find_tied_parameters(model)
    return (
        devices,
        budgets,
        main,
        accelerators,
        sizes,
        tied,
        list(class_names(no_split_module_classes)),
        parts("", model),
    )


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
    device = detect()
    available = list(range(device.count())) if device.type not in ("cpu", "mps") else []
    missing = [index for index in budgets if isinstance(index, int) and index not in available]
    if missing:
        logger.warning(
            "Devices in max_memory that are not available: %s; available devices are %s.", missing, available
        )
    return budgets


def _margin(model: nn.Module, sizes: Mapping[str, int], no_split: Collection[str]) -> int:
    """Bytes by which one device may exceed its even share, since blocks are placed whole."""
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    leaves = get_module_leaves(modules)
    mean_leaf = int(sum(modules[name] for name in leaves) / max(len(leaves), 1))
    blocks: dict[str, int] = {}
    for name in modules if no_split else ():
        kind = type(model.get_submodule(name)).__name__
        if name and kind in no_split:
            blocks.setdefault(kind, modules[name])
    return int(_BALANCE_MARGIN * max(mean_leaf, *blocks.values(), 0))


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

    Not a collective.

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

    Example:
        >>> from accelerate.utils import get_balanced_memory
        >>> get_balanced_memory(torch.nn.Linear(2, 1), max_memory={"cpu": "1GB"})
        {'cpu': 1000000000}
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
            # Activations need room on the only accelerator, and its size is unknown.
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


def computed_map(
    model: nn.Module,
    strategy: str,
    max_memory: Mapping[int | str, int | str] | None,
    offload_buffers: bool = False,
    **options: Any,
) -> dict[str, Device]:
    """Return the device map that a strategy stands for; `options` are those that balancing and inferring share."""
    if strategy not in _AUTOMATIC:
        raise ValueError(
            f"device_map={strategy!r} is unknown. Give a dict, or one of {', '.join(map(repr, _AUTOMATIC))}."
        )
    if strategy != "sequential":
        max_memory = get_balanced_memory(model, max_memory, low_zero=strategy == "balanced_low_0", **options)
    return infer_auto_device_map(model, max_memory, offload_buffers=offload_buffers, **options)
