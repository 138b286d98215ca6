"""Device maps in which one entry lies below another, or that give one module two places."""

from collections.abc import Mapping

from torch import nn

from accelerate.offload.placement import Device
from accelerate.offload.tied import device_of


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
