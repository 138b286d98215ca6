"""Deciding which module goes to which device, and checking such a decision."""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from accelerate.offload.memory import get_max_memory
from accelerate.offload.planner import Plan, fitting, make_plan, parts
from accelerate.offload.report import placement_table
from accelerate.offload.sizes import class_names, format_bytes
from accelerate.offload.tied import Ties, check_tied_parameters_in_config, name_and_parents
from accelerate.offload.waiting import Catalogue

logger = logging.getLogger("accelerate.utils.modeling")

Item = tuple[str, nn.Module | torch.Tensor]


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

    def holder(tensor: str) -> str | None:
        return next((part for part in name_and_parents(tensor) if part in names), None)

    ties = Ties(tied_parameters or ())
    no_split = class_names(no_split_module_classes)
    path = next(fitting(modules, module_sizes, size_limit, no_split, ties, holder), None)
    if path is None:
        return None, None, list(modules)
    waiting = list(modules)
    for name in path:
        position = next(index for index, (other, _) in enumerate(waiting) if other == name)
        _, module = waiting.pop(position)
        if name != path[-1]:
            waiting[position:position] = parts(name, module)
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
    explain: bool = False,
) -> dict[str, int | str]:
    """Return a device map that fills accelerators first, then the host memory, then the disk.

    Modules go in the order in which they are registered. The first accelerator (and the host memory) keep room for the
    largest layer, because offloaded layers run there. Modules with tied weights go to one device. A device that stays
    empty because its budget is too small is warned about.

    Args:
        model: The model; its tensors may be on the meta device. Tie its weights first.
        max_memory: The most that each device may take, as for `get_max_memory`. None: what is free.
        no_split_module_classes: Names of classes whose instances stay on one device, such as a block with a residual
            connection.
        dtype: Dtype that the weights will be cast to.
        special_dtypes: Exact dtypes for some tensors, by full name.
        verbose: Print each decision.
        clean_result: Replace the children of a module by the module where all are on one device.
        offload_buffers: The buffers of offloaded layers will be offloaded as well.
        fallback_allocation: Where the next module is too large for an empty device, look for one deeper that is not.
        explain: Print a table of the devices with what is placed there, and below it what did not fit and why.

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
    catalogue = Catalogue(model, no_split, {"dtype": dtype, "special_dtypes": special_dtypes})
    planned = partial(make_plan, catalogue, budgets, offload_buffers=offload_buffers)
    plan = planned(fallback=fallback_allocation, verbose=verbose)
    if not plan.tied and check_tied_parameters_in_config(model):
        logger.warning(
            "The model weights are not tied, although its configuration says that they should be. Call "
            "`model.tie_weights()` before `infer_auto_device_map`, or tied layers may land on different devices."
        )
    _warn_of_buffers(plan)
    _warn_of_empty_devices(plan, lambda: plan if fallback_allocation else planned(fallback=True))
    if explain:
        print(placement_table(plan.devices, plan.refusals))
    found = OrderedDict(plan.device_map)
    return clean_device_map(found) if clean_result else found


def _warn_of_buffers(plan: Plan) -> None:
    offloaded = sum(use.buffers for use in plan.devices if use.device in ("cpu", "disk"))
    free = [use.budget - use.used - use.reserve for use in plan.devices if use.device not in ("cpu", "disk")]
    if free and offloaded > max(0, *free):
        warnings.warn(
            f"The offloaded layers have {offloaded} bytes of buffers, which stay on the device that runs them, and "
            "that fits the remaining memory of none. If memory runs out, pass `offload_buffers=True`.",
            stacklevel=3,
        )


def _warn_of_empty_devices(plan: Plan, with_fallback: Callable[[], Plan]) -> None:
    """A budget of nothing is a wish; one that holds nothing is a mistake. The second plan shows what would help."""
    budgets = {use.device: use.budget for use in plan.devices if not use.used}
    lines = {}
    for refusal in plan.refusals:
        budget = budgets.get(refusal.device)
        if refusal.emptied and budget:
            shares = f"{refusal.size} for {refusal.name!r}"
            if refusal.layer:
                shares += f" and {refusal.reserve} kept free for the largest layer, {refusal.layer!r}"
            lines[refusal.device] = (
                f"\n  - {refusal.device}: {refusal.size + refusal.reserve} bytes required ({shares}), the budget is "
                f"{budget} ({format_bytes(budget)})"
            )
    if lines:
        filled = [use.device for use in with_fallback().devices if use.used and use.device in lines]
        hint = (
            f"\nWith `fallback_allocation=True` deeper modules fit on {', '.join(map(str, filled))}." if filled else ""
        )
        logger.warning(
            "These devices have too little memory for the next module and stay empty in this device map:%s%s",
            "".join(lines.values()),
            hint,
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
    entries: dict[str, list[str]] = {"": list(device_map)}  # module -> entries in it
    children: dict[str, dict[str, None]] = {}  # module -> the modules and tensors right below it
    for name in device_map:
        while name:
            outer = name.rpartition(".")[0]
            children.setdefault(outer, {})[name] = None
            name = outer
    for name in device_map:
        for outer in name_and_parents(name.rpartition(".")[0]):
            entries.setdefault(outer, []).append(name)
    pending = [module_name]
    while pending:
        name = pending.pop()
        inside = entries.get(name, ())
        if len(inside) > 1 and len({device_map[entry] for entry in inside}) == 1:
            device = device_map[inside[0]]
            for entry in inside:
                del device_map[entry]
            device_map[name] = device
        else:
            pending += reversed(children.get(name, ()))
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a device map covers every tensor of a model, and warn about entries that match nothing.

    Args:
        model: The model to be dispatched.
        device_map: Module or tensor names to devices.

    Raises:
        ValueError: Tensors have no device; the message names them.
    """
    tensors = list(model.state_dict(keep_vars=True))  # non-persistent buffers go where their module goes
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}.union(tensors)
    known.update(name for name, _ in model.named_buffers(remove_duplicate=False))
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warnings.warn(f"These device_map keys match no module or tensor of the model: {unknown}", stacklevel=2)
    if "" in device_map:
        return
    missing = [tensor for tensor in tensors if not any(part in device_map for part in name_and_parents(tensor))]
    if missing:
        raise ValueError(
            f"The device_map provided gives no device to these tensors: {', '.join(missing)}. Add them, a module that "
            "holds them, or '' for the rest of the model."
        )
