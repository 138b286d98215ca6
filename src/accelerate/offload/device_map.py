"""Deciding which module goes to which device, and checking such a decision."""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.devices import probe
from accelerate.diagnostics.table import table
from accelerate.offload.placement import Device, as_device
from accelerate.offload.planner import Plan, fitting, make_plan, parts
from accelerate.offload.sizes import class_names, format_bytes, get_max_memory
from accelerate.offload.tensors import Ties, check_tied_parameters_in_config, device_of, name_and_parents

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
    dtypes = {"dtype": dtype, "special_dtypes": special_dtypes}
    options = {"offload_buffers": offload_buffers, "fallback": fallback_allocation, "verbose": verbose}
    plan = make_plan(model, budgets, no_split, dtypes, **options)
    if not plan.tied and check_tied_parameters_in_config(model):
        logger.warning(
            "The model weights are not tied, although its configuration says that they should be. Call "
            "`model.tie_weights()` before `infer_auto_device_map`, or tied layers may land on different devices."
        )
    _warn_of_buffers(plan)
    _warn_of_empty_devices(plan)
    if explain:
        print(_explanation(plan))
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


def _warn_of_empty_devices(plan: Plan) -> None:
    """A budget of nothing is a wish; one that holds nothing is a mistake."""
    budgets = {use.device: use.budget for use in plan.devices if not use.used}
    lines = {}
    for refusal in plan.refusals:
        budget = budgets.get(refusal.device)
        if refusal.emptied and budget:
            shares = f"{refusal.size} for {refusal.name!r}"
            if refusal.reserve:
                shares += f" and {refusal.reserve} kept free for the largest layer"
            lines[refusal.device] = (
                f"\n  - {refusal.device}: {refusal.size + refusal.reserve} bytes required ({shares}), the budget is "
                f"{budget} ({format_bytes(budget)})"
            )
    if lines:
        logger.warning(
            "These devices have too little memory for the next module and stay empty in this device map. Give them more, or let "
            "`fallback_allocation=True` look for smaller modules:%s",
            "".join(lines.values()),
        )


def _explanation(plan: Plan) -> str:
    """The table that ``infer_auto_device_map(explain=True)`` prints."""
    rows = []
    for use in plan.devices:
        budget = free = "unlimited"
        if use.budget not in (None, float("inf")):
            budget, free = format_bytes(use.budget), format_bytes(use.budget - use.used)
        rows.append(
            [str(use.device), budget, format_bytes(use.reserve), format_bytes(use.used), free, str(use.modules)]
        )
    lines = [table(["device", "budget", "kept free for the largest layer", "used", "free", "modules"], rows)]
    if plan.refusals:
        lines += ["", "What did not fit:"]
    for refusal in plan.refusals:
        left = f"{format_bytes(max(0, refusal.left))} left"
        lines.append(f"  {refusal.name} ({format_bytes(refusal.size)}) on {refusal.device} ({left}): {refusal.cause}")
    return "\n".join(lines)


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


def check_devices(device_map: Mapping[str, Any]) -> None:
    """Refuse a device map that names devices which this machine does not have.

    Args:
        device_map: Module names to devices; ``"disk"`` is none.

    Raises:
        ValueError: A device is not there, or is no device.
    """
    for device in dict.fromkeys(device for device in device_map.values() if device != "disk"):
        found = as_device(device)
        if found.type in ("cpu", "meta"):
            continue
        kind = probe.row(found.type)
        count = kind.count() if kind.available() else 0
        if (found.index or 0) >= count:
            module = next(name for name, value in device_map.items() if value == device)
            raise ValueError(
                f"The device_map puts {module or 'the model'!r} on {device!r}, but this machine has {count} {found.type} "
                "devices. Use 'cpu' or 'disk', or device_map='auto'."
            )


def disjoint_map(model: nn.Module, device_map: Mapping[str, Device]) -> dict[str, Device]:
    """Return a device map that says the same with entries none of which lies below another.

    The longest entry that a tensor lies under decides, so ``{"": "cpu", "head": "disk"}`` is everything but the head on the CPU.
    A module that has several names is where the first of them is.

    Args:
        model: The model.
        device_map: Module or tensor names to devices; every tensor is covered.

    Returns:
        The map itself, copied, where nothing overlaps.

    Example:
        >>> disjoint_map(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)), {"": "cpu", "2": "disk"})
        {'0': 'cpu', '1': 'cpu', '2': 'disk'}
    """
    entries = {**device_map, **_places_of_other_names(model, device_map)}
    opened = set()
    for name in entries:
        parent = name
        while parent:
            parent = parent.rpartition(".")[0]
            opened.add(parent)
    if opened.isdisjoint(entries):
        return entries
    disjoint: dict[str, Device] = {}
    for name, device in entries.items():
        _add(model, name, device, entries, opened, disjoint)
    return disjoint


def _add(
    model: nn.Module,
    name: str,
    device: Device,
    entries: Mapping[str, Device],
    opened: set[str],
    disjoint: dict[str, Device],
) -> None:
    """Add an entry, or, if others lie below it, one for each part that they leave."""
    if name not in opened:
        disjoint[name] = device
        return
    module = model.get_submodule(name)
    prefix = f"{name}." if name else ""
    # The tables themselves, because torch's iterators leave out a second name for the same thing.
    for part, thing in (*module._parameters.items(), *module._buffers.items(), *module._modules.items()):
        if thing is not None and prefix + part not in entries:
            _add(model, prefix + part, device, entries, opened, disjoint)


def _places_of_other_names(model: nn.Module, device_map: Mapping[str, Device]) -> dict[str, Device]:
    """Entries for the tensors of modules that have several names, where the map gives the further ones another place."""
    first = {id(module): name for name, module in model.named_modules()}
    places: dict[str, Device] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        known = first[id(module)]
        for tensor in (*module._parameters, *module._buffers) if known != name else ():
            if tensor in module._non_persistent_buffers_set:
                continue  # in no checkpoint: they stay with the module
            other = f"{name}.{tensor}"
            place = device_of(f"{known}.{tensor}" if known else tensor, device_map)
            if getattr(module, tensor) is not None and place != device_of(other, device_map):
                places[other] = place
    return places
